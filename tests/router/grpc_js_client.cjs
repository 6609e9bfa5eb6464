// A stock client: @grpc/grpc-js and @grpc/proto-loader.  node grpc_js_client.cjs HOST:PORT PROTOS CALLS
// Prints one JSON object: texts of CALLS parallel streams on one channel, the order of one stream's events, and errors.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protos, calls] = process.argv.slice(2);
const definition = loader.loadSync("springtide/v1/generation.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: Number,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).springtide.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

function generate(request, options = {}, onData = () => {}) {
  return new Promise((resolve) => {
    const call = client.Generate(request, options);
    const found = { text: "", kinds: [], code: 0, details: "", trailers: [] };
    call.on("data", (message) => {
      found.kinds.push(message.event);
      found.text += message.tokens ? message.tokens.text : "";
      onData(call);
    });
    call.on("error", (error) => Object.assign(found, { code: error.code, details: error.details }));
    call.on("status", (status) => {
      found.code = status.code;
      found.trailers = Object.keys(status.metadata.getMap());
      setImmediate(() => resolve(found));
    });
  });
}

const ask = (i, tokens = 30) => ({ pool: "p", prompt: `tide ${i}`, sampling: { max_tokens: tokens } });

async function main() {
  const many = await Promise.all([...Array(Number(calls)).keys()].map((i) => generate(ask(i))));
  const deadline = await generate(ask(0, 1500), { deadline: Date.now() + 300 });
  const cancelled = await generate(ask(0, 1500), {}, (call) => call.cancel());
  const refused = await generate({ prompt: "x" });
  const models = await new Promise((resolve, reject) =>
    client.ListModels({}, (error, answer) => (error ? reject(error) : resolve(answer.models))),
  );
  const after = await generate(ask(1));
  console.log(JSON.stringify({ many, deadline, cancelled, refused, models, after }));
  client.close();
}

main();
