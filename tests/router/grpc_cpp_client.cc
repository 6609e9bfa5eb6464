// A stock client: gRPC for C++, as Debian has it.  grpc_cpp_client HOST:PORT CALLS
// Prints lines "name|code|kinds|text|reason" : CALLS parallel streams on one channel, a deadline, a cancellation, refusals.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "springtide/v1/generation.grpc.pb.h"

namespace pb = springtide::v1;
using Clock = std::chrono::system_clock;

std::mutex printing;

// The google.rpc.ErrorInfo of a status, and whether google.rpc.RetryInfo is beside it.
std::string details(const grpc::Status& status) {
  google::rpc::Status whole;
  if (!whole.ParseFromString(status.error_details())) return "unreadable";
  std::string found;
  for (const auto& any : whole.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&info)) found += info.reason();
    if (any.UnpackTo(&retry)) found += "+retry";
  }
  return found;
}

pb::GenerateRequest ask(const std::string& pool, const std::string& prompt, int tokens) {
  pb::GenerateRequest request;
  request.set_pool(pool);
  if (!prompt.empty()) request.set_prompt(prompt);
  request.mutable_sampling()->set_max_tokens(tokens);
  return request;
}

void generate(pb::GenerationService::Stub& stub, const std::string& name, const pb::GenerateRequest& request,
              int deadline_ms = 30000, int cancel_after = -1) {
  grpc::ClientContext context;
  context.set_deadline(Clock::now() + std::chrono::milliseconds(deadline_ms));
  auto reader = stub.Generate(&context, request);
  pb::GenerateResponse response;
  std::string text, kinds;
  int seen = 0;
  while (reader->Read(&response)) {
    kinds += response.has_started() ? 's' : response.has_tokens() ? 't' : response.has_finished() ? 'f' : '?';
    text += response.tokens().text();
    if (++seen == cancel_after) context.TryCancel();
  }
  const grpc::Status status = reader->Finish();
  std::lock_guard<std::mutex> lock(printing);
  std::cout << name << '|' << status.error_code() << '|' << kinds << '|' << text << '|' << details(status) << '\n';
}

int main(int, char** argv) {
  auto channel = grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials());
  pb::GenerationService::Stub stub(channel);
  std::vector<std::thread> threads;
  for (int i = 0; i < std::stoi(argv[2]); i++) {
    threads.emplace_back([&stub, i] {
      generate(stub, "many" + std::to_string(i), ask("p", "tide " + std::to_string(i), 30));
    });
  }
  for (auto& thread : threads) thread.join();
  generate(stub, "deadline", ask("p", "tide 0", 1500), 300);
  generate(stub, "cancelled", ask("p", "tide 0", 1500), 30000, 3);
  generate(stub, "refused", ask("p", "", 5));
  generate(stub, "unknown", ask("nope", "tide 0", 5));
  generate(stub, "empty", ask("p2", "tide 0", 5));
  {
    grpc::ClientContext context;
    pb::ListModelsResponse models;
    const auto status = stub.ListModels(&context, pb::ListModelsRequest(), &models);
    std::string names;
    for (const auto& model : models.models()) names += model.name() + " ";
    std::cout << "models|" << status.error_code() << "||" << names << "|\n";
  }
  generate(stub, "long", ask("p", std::string(600000, 'x'), 5));  // more than a window of flow control
  generate(stub, "after", ask("p", "tide 1", 30));
}
