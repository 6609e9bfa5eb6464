// Mock engine of the benchmark: OpenAI HTTP with server-sent events, and the same tokens as GenerateResponse over
// HTTP/2. One thread, one timer heap.
//
//   engine --port P [--host H] [--grpc-port P] [--unix PATH]     port 0 takes a free one
//
// It prints "http=PORT grpc=PORT" once it listens. What it does is set over HTTP, by GET /bench?rate=50&burst=0: tokens
// a second and stream, and whether all streams emit in the same instant (an engine step) or each at its own time.
// A token carries the engine's monotonic clock (16 hex digits, ns) for the client's latency figure.
#include "common.h"

typedef struct Conn Conn;

typedef struct Stream {
  Conn *conn;
  uint64_t due;
  int at;        // in the heap; -1: not there
  uint32_t id;   // HTTP/2
  long left;     // tokens to come
  int chat, ids; // ids: each event names its token
  struct Stream *next, **prev; // of the connection
} Stream;

struct Conn {
  int fd, h2, preface, dead, dirty, watching;
  Buf in, out;
  Stream *streams;
  int64_t window, stream_window;
};

static int ep;
static double rate = 50;
static int burst;
static uint64_t interval = NS / 50;
static uint64_t tokens_out;
static Stream **heap;
static int heap_len, heap_cap;
static Conn **dirty;
static int dirty_len, dirty_cap;
static Conn **dead;
static int dead_len, dead_cap;
static unsigned seed = 1;
#define MAX_OUT (256 * 1024)
#define LISTENER(kind) ((void *)(intptr_t)(kind))
enum { L_HTTP = 1, L_GRPC = 2, L_UNIX = 3 };
static int listeners[4];

#define PUSH(list, item)                                                                                              \
  do {                                                                                                                \
    if (list##_len == list##_cap) list = must(realloc(list, sizeof *list * (list##_cap = list##_cap * 2 + 64)));      \
    list[list##_len++] = (item);                                                                                      \
  } while (0)

// ---------------------------------------------------------------- timers

static void place(int i, Stream *s) { heap[i] = s, s->at = i; }

static void sift(int i) {
  Stream *s = heap[i];
  while (i && heap[(i - 1) / 2]->due > s->due) place(i, heap[(i - 1) / 2]), i = (i - 1) / 2;
  for (int c; (c = 2 * i + 1) < heap_len; i = c) {
    if (c + 1 < heap_len && heap[c + 1]->due < heap[c]->due) c++;
    if (heap[c]->due >= s->due) break;
    place(i, heap[c]);
  }
  place(i, s);
}

static void heap_add(Stream *s) {
  PUSH(heap, s);
  s->at = heap_len - 1;
  sift(s->at);
}

static void heap_remove(Stream *s) {
  if (s->at < 0) return;
  int i = s->at;
  Stream *last = heap[--heap_len];
  s->at = -1;
  if (last != s) place(i, last), sift(i);
}

// ---------------------------------------------------------------- writing

static void touch(Conn *c) {
  if (!c->dirty && !c->dead) {
    c->dirty = 1;
    PUSH(dirty, c);
  }
}

static void watch(Conn *c, int writable) {
  if (c->watching == writable) return;
  c->watching = writable;
  struct epoll_event e = {EPOLLIN | (writable ? EPOLLOUT : 0), {.ptr = c}};
  epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

static void end_stream(Stream *s) {
  heap_remove(s);
  if ((*s->prev = s->next)) s->next->prev = s->prev;
  free(s);
}

static void end_conn(Conn *c) {
  if (c->dead) return;
  c->dead = 1;
  while (c->streams) end_stream(c->streams);
  close(c->fd);
  buf_free(&c->in);
  buf_free(&c->out);
  PUSH(dead, c); // freed after the loop pass
}

static void flush(Conn *c) {
  while (c->out.len) {
    ssize_t n = send(c->fd, c->out.p, c->out.len, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EAGAIN) break;
      end_conn(c);
      return;
    }
    buf_eat(&c->out, n);
  }
  watch(c, c->out.len > 0);
  if (!c->out.len && c->out.cap > 4096) buf_free(&c->out);
}

// ---------------------------------------------------------------- tokens

static const char SSE_HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "transfer-encoding: chunked\r\n\r\n";

static void sse_event(Conn *c, const char *data, int n) {
  char size[16];
  buf_add(&c->out, size, sprintf(size, "%x\r\n", n));
  buf_add(&c->out, data, n);
  buf_add(&c->out, "\r\n", 2);
}

static void sse_token(Stream *s, const char *finish) {
  char data[512];
  unsigned long long t = now_ns();
  const char *reason = finish ? "\"stop\"" : "null", *ids = s->ids ? "[4321]" : "null";
  int n = s->chat
              ? sprintf(data,
                        "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\","
                        "\"created\":1790000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" t%016llx\"},"
                        "\"logprobs\":null,\"finish_reason\":%s,\"token_ids\":%s}]}\n\n",
                        t, reason, ids)
              : sprintf(data,
                        "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\","
                        "\"created\":1790000000,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" t%016llx\","
                        "\"logprobs\":null,\"finish_reason\":%s,\"stop_reason\":null,\"token_ids\":%s}]}\n\n",
                        t, reason, ids);
  sse_event(s->conn, data, n);
}

static void grpc_message(Stream *s, const char *body, int n) {
  char m[128] = {0, 0, 0, 0, n};
  memcpy(m + 5, body, n);
  Conn *c = s->conn;
  h2_frame(&c->out, F_DATA, 0, s->id, m, n + 5);
  c->window -= n + 5;
}

static void grpc_token(Stream *s) {
  char m[64] = "\x12\x14\x0a\x12 t"; // GenerateResponse.tokens.text, 18 bytes
  sprintf(m + 6, "%016llx", (unsigned long long)now_ns());
  grpc_message(s, m, 4 + 18);
}

// The next token of a stream; what its end needs with the last one. Gives 0 when the stream is gone.
static int token(Stream *s) {
  Conn *c = s->conn;
  touch(c);
  if (c->out.len > MAX_OUT || (c->h2 && c->window < 4096)) return 1; // the reader is behind: this token is not made
  tokens_out++;
  s->left--;
  if (c->h2) {
    grpc_token(s);
    if (s->left > 0) return 1;
    grpc_message(s, "\x1a\x06\x0a\x04stop", 8);
    Buf trailers = {0};
    hpack(&trailers, 0, "grpc-status", "0");
    h2_frame(&c->out, F_HEADERS, END_STREAM | END_HEADERS, s->id, trailers.p, trailers.len);
    buf_free(&trailers);
  } else {
    sse_token(s, s->left > 0 ? NULL : "stop");
    if (s->left > 0) return 1;
    sse_event(c, "data: [DONE]\n\n", 14);
    buf_add(&c->out, "0\r\n\r\n", 5);
  }
  end_stream(s);
  return 0;
}

static void begin(Conn *c, uint32_t id, long tokens, int chat, int ids) {
  Stream *s = must(calloc(1, sizeof *s));
  s->conn = c, s->id = id, s->left = tokens, s->chat = chat, s->ids = ids, s->at = -1;
  if ((s->next = c->streams)) s->next->prev = &s->next;
  s->prev = &c->streams;
  c->streams = s;
  if (c->h2) {
    Buf h = {0};
    buf_add(&h, "\x88", 1);
    hpack(&h, 31, 0, "application/grpc");
    h2_frame(&c->out, F_HEADERS, END_HEADERS, id, h.p, h.len);
    buf_free(&h);
    grpc_message(s, "\x0a\x09\x0a\x01r\x12\x02w1\x18\x01", 11);
  } else {
    buf_add(&c->out, SSE_HEAD, sizeof SSE_HEAD - 1);
  }
  uint64_t now = now_ns();
  if (!token(s)) return;
  s->due = burst ? (now / interval + 1) * interval : now + 1 + interval / 1024 * (rand_r(&seed) % 1024);
  heap_add(s);
}

static void run_timers(void) {
  uint64_t now = now_ns();
  while (heap_len && heap[0]->due <= now) {
    Stream *s = heap[0];
    s->due += interval;
    if (s->due + NS < now) s->due = now + interval; // far behind: no storm
    sift(0);
    token(s);
  }
}

// ---------------------------------------------------------------- HTTP/1.1

static long number_after(const char *text, size_t n, const char *key, long otherwise) {
  char *p = memmem(text, n, key, strlen(key));
  return p ? atol(p + strlen(key)) : otherwise;
}

static void answer(Conn *c, const char *body) {
  char head[256];
  buf_add(&c->out, head,
          sprintf(head, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", strlen(body)));
  buf_add(&c->out, body, strlen(body));
  touch(c);
}

static void settings(const char *query) {
  char *p;
  if ((p = strstr(query, "rate="))) rate = atof(p + 5);
  if ((p = strstr(query, "burst="))) burst = atoi(p + 6);
  interval = (uint64_t)(NS / rate);
}

static void serve(Conn *c, char *head, char *body, size_t n) {
  char *eol = strchr(head, '\r');
  *eol = 0;
  if (!strncmp(head, "GET /bench", 10)) {
    char text[128];
    settings(head);
    sprintf(text, "{\"tokens\":%llu,\"streams\":%d}", (unsigned long long)tokens_out, heap_len);
    answer(c, text);
  } else if (!strncmp(head, "POST /v1/", 9)) {
    int chat = strstr(head, "/chat/") != NULL;
    if (memmem(body, n, "\"stream\":true", 13) || memmem(body, n, "\"stream\": true", 14)) {
      begin(c, 0, number_after(body, n, "\"max_tokens\":", 16), chat, memmem(body, n, "return_token_ids\":true", 22) != NULL);
    } else {
      answer(c, chat ? "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1790000000,\"model\":"
                       "\"m\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Paris is it.\"},"
                       "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4,\"total_tokens\":9}}"
                     : "{\"id\":\"cmpl-0123456789abcdef0123\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":"
                       "\"m\",\"choices\":[{\"index\":0,\"text\":\" Paris is the capital.\",\"logprobs\":null,"
                       "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":4,\"total_tokens\":9}}");
    }
  } else if (strstr(head, "/v1/models")) {
    answer(c, "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1,\"owned_by\":\"bench\"}]}");
  } else {
    answer(c, "{\"model_path\":\"m\",\"served_model_name\":\"m\",\"status\":\"ok\",\"is_generation\":true}");
  }
}

static void read_http(Conn *c) {
  while (c->in.len && !c->dead) {
    char *end = memmem(c->in.p, c->in.len, "\r\n\r\n", 4);
    if (!end) return;
    size_t head = end + 4 - c->in.p, body = 0;
    for (char *p = c->in.p; p < end; p++)
      if (*p == '\n' && !strncasecmp(p + 1, "content-length:", 15)) body = strtoul(p + 16, 0, 10);
    if (c->in.len < head + body) return;
    serve(c, c->in.p, c->in.p + head, body);
    if (!c->dead) buf_eat(&c->in, head + body);
  }
  if (!c->dead) buf_free(&c->in);
}

// ---------------------------------------------------------------- HTTP/2

// Requests are not unpacked: `max_tokens` is read from GenerateRequest.sampling (field 5) when it is the first there.
static long grpc_tokens(const unsigned char *p, size_t n) {
  for (size_t i = 5; i + 3 < n; i++)
    if (p[i] == 0x2a && p[i + 2] == 0x08) {
      long v = 0;
      for (int shift = 0; (i += 1) + 2 <= n; shift += 7) {
        v |= (long)(p[i + 2] & 0x7f) << shift;
        if (!(p[i + 2] & 0x80)) return v;
      }
    }
  return 16;
}

static void h2_settings(Conn *c, const unsigned char *p, size_t n) {
  for (; n >= 6; p += 6, n -= 6)
    if (p[0] == 0 && p[1] == 4) c->stream_window = get32(p + 2);
  h2_frame(&c->out, F_SETTINGS, ACK, 0, 0, 0);
}

static void read_h2(Conn *c) {
  unsigned char *p = (unsigned char *)c->in.p;
  size_t at = 0;
  if (!c->preface) {
    if (c->in.len < H2_PREFACE_LEN) return;
    at = H2_PREFACE_LEN, c->preface = 1;
    h2_frame(&c->out, F_SETTINGS, 0, 0, "\x00\x03\x00\x00\x10\x00\x00\x04\x00\x10\x00\x00", 12);
    touch(c);
  }
  while (c->in.len - at >= 9) {
    unsigned char *f = p + at;
    size_t n = f[0] << 16 | f[1] << 8 | f[2];
    if (c->in.len - at < 9 + n) break;
    int type = f[3], flags = f[4];
    uint32_t id = get32(f + 5) & 0x7fffffff;
    unsigned char *body = f + 9;
    if (type == F_SETTINGS && !(flags & ACK)) h2_settings(c, body, n), touch(c);
    else if (type == F_PING && !(flags & ACK)) h2_frame(&c->out, F_PING, ACK, 0, body, n), touch(c);
    else if (type == F_WINDOW && id == 0) c->window += get32(body) & 0x7fffffff;
    else if (type == F_RST) {
      for (Stream *s = c->streams; s; s = s->next)
        if (s->id == id) {
          end_stream(s);
          break;
        }
    } else if (type == F_DATA) {
      if (n) h2_window(&c->out, 0, n), touch(c);
      if (n > 5) begin(c, id, grpc_tokens(body, n), 0, 0); // the whole message is in one frame
    }
    at += 9 + n;
  }
  buf_eat(&c->in, at);
}

// ---------------------------------------------------------------- loop

static void readable(Conn *c) {
  char data[65536];
  for (;;) {
    ssize_t n = recv(c->fd, data, sizeof data, 0);
    if (n > 0) {
      buf_add(&c->in, data, n);
      if (n == sizeof data) continue;
      break;
    }
    if (n < 0 && errno == EAGAIN) break;
    end_conn(c);
    return;
  }
  if (c->h2) read_h2(c);
  else read_http(c);
}

static void accept_all(int kind) {
  for (;;) {
    int fd = accept(listeners[kind], 0, 0);
    if (fd < 0) return;
    tune(fd);
    Conn *c = must(calloc(1, sizeof *c));
    c->fd = fd, c->h2 = kind == L_GRPC, c->window = 65535;
    struct epoll_event e = {EPOLLIN, {.ptr = c}};
    epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
  }
}

static int listen_tcp(const char *host, int port, int kind) {
  int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port)};
  socklen_t n = sizeof a;
  inet_pton(AF_INET, host, &a.sin_addr);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(fd, (void *)&a, n) || listen(fd, 8192)) die("listen");
  getsockname(fd, (void *)&a, &n);
  tune(fd);
  listeners[kind] = fd;
  struct epoll_event e = {EPOLLIN, {.ptr = LISTENER(kind)}};
  epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
  return ntohs(a.sin_port);
}

static void listen_unix(const char *path) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  strncpy(a.sun_path, path, sizeof a.sun_path - 1);
  unlink(path);
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (bind(fd, (void *)&a, sizeof a) || listen(fd, 8192)) die("listen on the unix socket");
  tune(fd);
  listeners[L_UNIX] = fd;
  struct epoll_event e = {EPOLLIN, {.ptr = LISTENER(L_UNIX)}};
  epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
}

int main(int argc, char **argv) {
  const char *host = "127.0.0.1", *path = NULL;
  int port = -1, grpc_port = -1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!strcmp(argv[i], "--host")) host = argv[i + 1];
    else if (!strcmp(argv[i], "--port")) port = atoi(argv[i + 1]);
    else if (!strcmp(argv[i], "--grpc-port")) grpc_port = atoi(argv[i + 1]);
    else if (!strcmp(argv[i], "--unix")) path = argv[i + 1];
  }
  raise_fd_limit();
  ep = epoll_create1(0);
  if (port >= 0) port = listen_tcp(host, port, L_HTTP);
  if (grpc_port >= 0) grpc_port = listen_tcp(host, grpc_port, L_GRPC);
  if (path) listen_unix(path);
  printf("http=%d grpc=%d\n", port, grpc_port);
  fflush(stdout);
  struct epoll_event events[1024];
  for (;;) {
    struct timespec wait = {1, 0};
    if (heap_len) {
      uint64_t now = now_ns(), left = heap[0]->due > now ? heap[0]->due - now : 0;
      wait.tv_sec = left / NS, wait.tv_nsec = left % NS;
    }
    int n = epoll_pwait2(ep, events, 1024, &wait, NULL);
    for (int i = 0; i < n; i++) {
      void *p = events[i].data.ptr;
      if ((intptr_t)p <= L_UNIX) {
        accept_all((int)(intptr_t)p);
        continue;
      }
      Conn *c = p;
      if (c->dead) continue;
      if (events[i].events & EPOLLOUT) flush(c);
      if (!c->dead && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
    }
    run_timers();
    for (int i = 0; i < dirty_len; i++) {
      Conn *c = dirty[i];
      c->dirty = 0;
      if (!c->dead) flush(c);
    }
    dirty_len = 0;
    for (int i = 0; i < dead_len; i++) free(dead[i]);
    dead_len = 0;
  }
}
