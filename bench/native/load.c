// Load client of the benchmark: HTTP/1.1 (one request at a time on each connection) or gRPC over HTTP/2.
//
//   load --port P --conns N [--streams S] --path PATH --body FILE --mode hold|turns|short|grpc|grpc-turns
//        [--ramp S] [--warm S] --seconds S [--think-ms M] [--pid NAME=PID]...
//
// hold, grpc:        every slot holds one stream for the whole run (the body asks for more tokens than can come)
// turns, grpc-turns: every slot asks again when its stream has ended, on the same connection
// short:             answers that are no streams, in a closed loop
//
// The window of the measurement opens when every slot had its first token or answer, and after `--warm`. CPU (user and
// system, /proc/PID/stat) and memory of the named processes are read at its borders. One line of JSON goes to stdout.
#include "common.h"
#include <poll.h>

typedef struct {
  uint64_t sent_at, next_at;
  int waiting_first, ever, open;
  Buf part; // gRPC: an incomplete message
} Slot;

typedef struct {
  int fd, h2, dead, in_body, chunked, newline;
  long need;
  char tail[5];
  Buf in;
  Slot *slots;
  int *slot_of, slot_of_cap;
  uint32_t next_id;
} Conn;

#define MAX_PIDS 64
#define MAX_SAMPLES (1 << 20)
static int ep, n_conns = 1, n_streams = 1, grpc, turns, single;
static double ramp_s = 1, warm_s = 1, seconds = 5, think_ms;
static const char *host = "127.0.0.1", *path = "/v1/completions";
static int port;
static Buf request, message;
static Conn *conns;
static long firsts, finished, tokens, errors, timeouts;
static char first_error[400];
static int measuring;
static unsigned seed = 7;
static struct sockaddr_in address;

static struct {
  char name[32];
  int pid;
  double user, sys;
  long rss_before;
} pids[MAX_PIDS];
static int n_pids;

typedef struct {
  float *v;
  int n;
} Samples;
static Samples ttft, latency;

static void sample(Samples *s, double us) {
  if (!s->v) s->v = must(malloc(sizeof(float) * MAX_SAMPLES));
  if (s->n < MAX_SAMPLES) s->v[s->n++] = us;
}

static int by_value(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static void print_samples(const char *name, Samples *s) {
  if (!s->n) {
    printf(",\"%s\":null", name);
    return;
  }
  qsort(s->v, s->n, sizeof(float), by_value);
  printf(",\"%s\":{\"n\":%d,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", name, s->n, s->v[s->n / 2],
         s->v[(int)(s->n * .9)], s->v[(int)(s->n * .99)], s->v[s->n - 1]);
}

// ---------------------------------------------------------------- what the kernel says of a process

static void cpu_of(int pid, double *user, double *sys) {
  char file[64], text[2048];
  sprintf(file, "/proc/%d/stat", pid);
  FILE *f = fopen(file, "r");
  unsigned long u = 0, s = 0;
  if (f) {
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    char *p = strrchr(text, ')');
    if (p) sscanf(p + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &u, &s);
    fclose(f);
  }
  double tick = sysconf(_SC_CLK_TCK);
  *user = u / tick, *sys = s / tick;
}

static long rss_of(int pid) {
  char file[64];
  sprintf(file, "/proc/%d/statm", pid);
  FILE *f = fopen(file, "r");
  long all = 0, rss = 0;
  if (f) {
    if (fscanf(f, "%ld %ld", &all, &rss) != 2) rss = 0;
    fclose(f);
  }
  return rss * (sysconf(_SC_PAGESIZE) / 1024);
}

// ---------------------------------------------------------------- sending

static void failed(const char *what, const char *detail, int n) {
  if (!errors++) snprintf(first_error, sizeof first_error, "%s: %.*s", what, n, detail);
}

static void send_all(Conn *c, const char *data, size_t n) {
  while (n) {
    ssize_t sent = send(c->fd, data, n, MSG_NOSIGNAL);
    if (sent < 0 && errno == EAGAIN) {
      struct pollfd p = {c->fd, POLLOUT, 0};
      poll(&p, 1, 1000);
      continue;
    }
    if (sent < 0) return; // the read side will say so
    data += sent, n -= sent;
  }
}

static void ask(Conn *c, int i) {
  Slot *s = &c->slots[i];
  s->waiting_first = s->open = 1;
  s->next_at = 0;
  s->sent_at = now_ns();
  if (!grpc) {
    send_all(c, request.p, request.len);
    return;
  }
  Buf out = {0}, h = {0};
  char authority[64];
  sprintf(authority, "%s:%d", host, port);
  buf_add(&h, "\x83\x86", 2); // POST, http
  hpack(&h, 4, 0, path);
  hpack(&h, 1, 0, authority);
  hpack(&h, 31, 0, "application/grpc");
  hpack(&h, 0, "te", "trailers");
  uint32_t id = c->next_id;
  c->next_id += 2;
  int k = id / 2;
  if (k >= c->slot_of_cap) c->slot_of = must(realloc(c->slot_of, sizeof(int) * (c->slot_of_cap = k * 2 + 64)));
  c->slot_of[k] = i;
  h2_frame(&out, F_HEADERS, END_HEADERS, id, h.p, h.len);
  h2_frame(&out, F_DATA, END_STREAM, id, message.p, message.len);
  send_all(c, out.p, out.len);
  buf_free(&out), buf_free(&h);
}

static void open_conn(Conn *c) {
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  c->slots = must(calloc(n_streams, sizeof(Slot)));
  if (c->fd < 0 || connect(c->fd, (void *)&address, sizeof address)) die("connect");
  tune(c->fd);
  struct epoll_event e = {EPOLLIN, {.ptr = c}};
  epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
  if (grpc) {
    Buf out = {0};
    buf_add(&out, H2_PREFACE, H2_PREFACE_LEN);
    h2_frame(&out, F_SETTINGS, 0, 0, "\x00\x02\x00\x00\x00\x00\x00\x04\x01\x00\x00\x00", 12);
    h2_window(&out, 0, 1 << 30);
    send_all(c, out.p, out.len);
    buf_free(&out);
    c->next_id = 1;
  }
}

// ---------------------------------------------------------------- receiving

static void first(Slot *s, uint64_t now) {
  if (!s->waiting_first) return;
  s->waiting_first = 0;
  if (!s->ever) s->ever = 1, firsts++;
  if (measuring) sample(&ttft, (now - s->sent_at) / 1e3);
}

static void over(Conn *c, int i) {
  Slot *s = &c->slots[i];
  s->open = 0;
  if (measuring) finished++;
  if (!turns) {
    failed("a stream ended that should go on", "", 0);
    return;
  }
  if (think_ms > 0) s->next_at = now_ns() + (uint64_t)(think_ms * 1e6 * (rand_r(&seed) % 1000) / 1000);
  else ask(c, i);
}

static void stamp(const char *data, size_t n, uint64_t now) {
  char *p = memmem(data, n, " t0", 3);
  if (!p || p + 18 > data + n || !measuring) return;
  char hex[17] = {0};
  memcpy(hex, p + 2, 16);
  uint64_t t = strtoull(hex, 0, 16);
  if (t && t < now) sample(&latency, (now - t) / 1e3);
}

static void lost(Conn *c, const char *why) {
  c->dead = 1;
  close(c->fd);
  failed("connection lost", why, strlen(why));
}

static void http_data(Conn *c, char *data, size_t n, uint64_t now) {
  if (!c->in_body) {
    buf_add(&c->in, data, n);
    char *end = memmem(c->in.p, c->in.len, "\r\n\r\n", 4);
    if (!end) return;
    buf_add(&c->in, "", 1);
    end = memmem(c->in.p, c->in.len, "\r\n\r\n", 4);
    if (strncmp(c->in.p, "HTTP/1.1 200", 12)) {
      failed("answer", c->in.p, c->in.len);
      c->dead = 1;
      close(c->fd);
      return;
    }
    size_t head = end + 4 - c->in.p;
    c->chunked = 1, c->need = -1;
    for (char *p = c->in.p; p < end; p++)
      if (*p == '\n' && !strncasecmp(p + 1, "content-length:", 15)) c->need = atol(p + 16), c->chunked = 0;
    c->in_body = 1, c->newline = 0;
    memset(c->tail, 0, 5);
    static char rest[1 << 17];
    size_t left = c->in.len - 1 - head;
    memcpy(rest, c->in.p + head, left);
    buf_free(&c->in);
    if (left) http_data(c, rest, left, now);
    return;
  }
  Slot *s = &c->slots[0];
  first(s, now);
  if (!single) {
    long found = 0;
    for (char *p = data, *end = data + n; p < end;) { // an event ends with two newlines
      if (c->newline && *p == '\n') {
        found++, c->newline = 0, p++;
        continue;
      }
      char *nl = memchr(p, '\n', end - p);
      c->newline = nl != NULL;
      p = nl ? nl + 1 : end;
    }
    if (measuring) tokens += found;
    stamp(data, n, now);
  }
  int done;
  if (c->chunked) {
    for (size_t i = n > 5 ? n - 5 : 0; i < n; i++) memmove(c->tail, c->tail + 1, 4), c->tail[4] = data[i];
    done = !memcmp(c->tail, "0\r\n\r\n", 5);
  } else {
    c->need -= n;
    done = c->need <= 0;
  }
  if (done) {
    c->in_body = 0;
    over(c, 0);
  }
}

static void grpc_data(Conn *c, int i, char *data, size_t n, uint64_t now) {
  Slot *s = &c->slots[i];
  if (s->part.len) {
    buf_add(&s->part, data, n);
    data = s->part.p, n = s->part.len;
  }
  size_t at = 0;
  while (n - at >= 5) {
    size_t size = get32((unsigned char *)data + at + 1);
    if (n - at < 5 + size) break;
    if (size && data[at + 5] == 0x12) { // tokens
      first(s, now);
      if (measuring) tokens++;
      stamp(data + at + 5, size, now);
    }
    at += 5 + size;
  }
  if (s->part.len) {
    buf_eat(&s->part, at);
    if (!s->part.len) buf_free(&s->part);
  } else if (at < n) {
    buf_add(&s->part, data + at, n - at);
  }
}

static void h2_data(Conn *c, char *data, size_t n, uint64_t now) {
  buf_add(&c->in, data, n);
  size_t at = 0;
  Buf out = {0};
  while (c->in.len - at >= 9) {
    unsigned char *f = (unsigned char *)c->in.p + at;
    size_t size = f[0] << 16 | f[1] << 8 | f[2];
    if (c->in.len - at < 9 + size) break;
    int type = f[3], flags = f[4];
    uint32_t id = get32(f + 5) & 0x7fffffff;
    int slot = id ? c->slot_of[id / 2] : 0;
    if (type == F_SETTINGS && !(flags & ACK)) h2_frame(&out, F_SETTINGS, ACK, 0, 0, 0);
    else if (type == F_PING && !(flags & ACK)) h2_frame(&out, F_PING, ACK, 0, f + 9, size);
    else if (type == F_DATA) grpc_data(c, slot, (char *)f + 9, size, now);
    else if (type == F_GOAWAY) failed("GOAWAY", (char *)f + 17, size - 8);
    else if (type == F_RST) failed("RST_STREAM", "", 0), c->slots[slot].open = 0;
    if ((type == F_DATA || type == F_HEADERS) && flags & END_STREAM) {
      if (c->slots[slot].waiting_first) failed("a call ended without a token", "", 0), c->slots[slot].open = 0;
      else over(c, slot);
    }
    at += 9 + size;
  }
  buf_eat(&c->in, at);
  if (!c->in.len) buf_free(&c->in);
  if (out.len) send_all(c, out.p, out.len);
  buf_free(&out);
}

static void readable(Conn *c) {
  static char data[1 << 16];
  for (;;) {
    ssize_t n = recv(c->fd, data, sizeof data, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      lost(c, n ? strerror(errno) : "end of file");
      return;
    }
    uint64_t now = now_ns();
    if (grpc) h2_data(c, data, n, now);
    else http_data(c, data, n, now);
    if (c->dead || n < (ssize_t)sizeof data) return;
  }
}

static void pass(uint64_t until) {
  struct epoll_event events[1024];
  uint64_t now = now_ns(), left = until > now ? until - now : 0;
  struct timespec wait = {left / NS, left % NS};
  int n = epoll_pwait2(ep, events, 1024, &wait, NULL);
  for (int i = 0; i < n; i++) {
    Conn *c = events[i].data.ptr;
    if (!c->dead) readable(c);
  }
  if (think_ms <= 0) return;
  now = now_ns();
  for (int i = 0; i < n_conns; i++)
    for (int k = 0; k < n_streams && conns[i].slots; k++) {
      Slot *s = &conns[i].slots[k];
      if (s->next_at && s->next_at <= now && !conns[i].dead) ask(&conns[i], k);
    }
}

static void run_until(uint64_t end) {
  uint64_t now;
  while ((now = now_ns()) < end) {
    uint64_t step = now + NS / (think_ms > 0 ? 1000 : 20);
    pass(step < end ? step : end);
  }
}

static void read_file(Buf *b, const char *name) {
  char data[65536];
  FILE *f = fopen(name, "rb");
  if (!f) die(name);
  for (size_t n; (n = fread(data, 1, sizeof data, f)) > 0;) buf_add(b, data, n);
  fclose(f);
}

static void prepare(const char *body) {
  Buf b = {0};
  read_file(&b, body);
  if (grpc) {
    unsigned char prefix[5] = {0};
    put32(prefix + 1, b.len);
    buf_add(&message, prefix, 5);
    buf_add(&message, b.p, b.len);
  } else {
    char head[512];
    buf_add(&request, head,
            sprintf(head,
                    "POST %s HTTP/1.1\r\nhost: %s:%d\r\nuser-agent: bench\r\naccept: */*\r\n"
                    "content-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                    path, host, port, b.len));
    buf_add(&request, b.p, b.len);
  }
  buf_free(&b);
}

int main(int argc, char **argv) {
  const char *mode = "hold", *body = NULL;
  for (int i = 1; i + 1 < argc; i += 2) {
    const char *k = argv[i], *v = argv[i + 1];
    if (!strcmp(k, "--mode")) mode = v;
    else if (!strcmp(k, "--host")) host = v;
    else if (!strcmp(k, "--port")) port = atoi(v);
    else if (!strcmp(k, "--conns")) n_conns = atoi(v);
    else if (!strcmp(k, "--streams")) n_streams = atoi(v);
    else if (!strcmp(k, "--path")) path = v;
    else if (!strcmp(k, "--body")) body = v;
    else if (!strcmp(k, "--ramp")) ramp_s = atof(v);
    else if (!strcmp(k, "--warm")) warm_s = atof(v);
    else if (!strcmp(k, "--seconds")) seconds = atof(v);
    else if (!strcmp(k, "--think-ms")) think_ms = atof(v);
    else if (!strcmp(k, "--pid") && n_pids < MAX_PIDS) {
      const char *eq = strchr(v, '=');
      snprintf(pids[n_pids].name, 32, "%.*s", (int)(eq - v), v);
      pids[n_pids++].pid = atoi(eq + 1);
    } else {
      fprintf(stderr, "load: unknown argument %s\n", k);
      return 2;
    }
  }
  grpc = !strncmp(mode, "grpc", 4);
  single = !strcmp(mode, "short");
  turns = single || strstr(mode, "turns") != NULL;
  raise_fd_limit();
  prepare(body);
  address.sin_family = AF_INET, address.sin_port = htons(port);
  inet_pton(AF_INET, host, &address.sin_addr);
  ep = epoll_create1(0);
  conns = must(calloc(n_conns, sizeof(Conn)));
  for (int i = 0; i < n_pids; i++) pids[i].rss_before = rss_of(pids[i].pid);

  uint64_t began = now_ns();
  long all = (long)n_conns * n_streams, asked = 0;
  for (int i = 0; i < n_conns; i++) {
    open_conn(&conns[i]);
    for (int k = 0; k < n_streams; k++) {
      run_until(began + (uint64_t)(ramp_s * NS * asked++ / all));
      if (!conns[i].dead) ask(&conns[i], k);
    }
  }
  uint64_t patience = now_ns() + 30 * NS;
  while (firsts < all && now_ns() < patience && !errors) pass(now_ns() + NS / 100);
  timeouts = all - firsts;
  run_until(now_ns() + (uint64_t)(warm_s * NS));

  struct rusage mine0, mine1;
  getrusage(RUSAGE_SELF, &mine0);
  for (int i = 0; i < n_pids; i++) cpu_of(pids[i].pid, &pids[i].user, &pids[i].sys);
  measuring = 1;
  uint64_t t0 = now_ns();
  run_until(t0 + (uint64_t)(seconds * NS));
  uint64_t t1 = now_ns();
  measuring = 0;
  printf("{\"mode\":\"%s\",\"slots\":%ld,\"window_s\":%.3f,\"tokens\":%ld,\"finished\":%ld,\"errors\":%ld,\"silent\":%ld",
         mode, all, (t1 - t0) / 1e9, tokens, finished, errors, timeouts);
  printf(",\"cpu\":[");
  for (int i = 0; i < n_pids; i++) {
    double user, sys;
    cpu_of(pids[i].pid, &user, &sys);
    printf("%s{\"name\":\"%s\",\"pid\":%d,\"user_s\":%.2f,\"sys_s\":%.2f,\"rss_before_kb\":%ld,\"rss_kb\":%ld}",
           i ? "," : "", pids[i].name, pids[i].pid, user - pids[i].user, sys - pids[i].sys, pids[i].rss_before,
           rss_of(pids[i].pid));
  }
  printf("]");
  getrusage(RUSAGE_SELF, &mine1);
  printf(",\"load_cpu_s\":%.3f",
         (mine1.ru_utime.tv_sec - mine0.ru_utime.tv_sec + mine1.ru_stime.tv_sec - mine0.ru_stime.tv_sec) +
             (mine1.ru_utime.tv_usec - mine0.ru_utime.tv_usec + mine1.ru_stime.tv_usec - mine0.ru_stime.tv_usec) / 1e6);
  print_samples("ttft_us", &ttft);
  print_samples("latency_us", &latency);
  for (char *p = first_error; *p; p++)
    if (*p < ' ' || *p == '"' || *p == '\\' || (unsigned char)*p > 126) *p = ' ';
  printf(",\"error\":\"%s\"}\n", first_error);
  return 0;
}
