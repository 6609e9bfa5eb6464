// What the mock engine and the load client share: time, sockets, growing buffers, and the few HTTP/2 frames that both
// speak. Bench only; nothing of the product is built from this.
#ifndef SPRINGTIDE_BENCH_COMMON_H
#define SPRINGTIDE_BENCH_COMMON_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000ull

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * NS + t.tv_nsec;
}

static inline void die(const char *what) {
  perror(what);
  exit(1);
}

static inline void *must(void *p) {
  if (!p) die("memory");
  return p;
}

static inline void raise_fd_limit(void) {
  struct rlimit r;
  getrlimit(RLIMIT_NOFILE, &r);
  r.rlim_cur = r.rlim_max;
  setrlimit(RLIMIT_NOFILE, &r);
}

static inline void tune(int fd) {
  int one = 1;
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

// ---------------------------------------------------------------- buffers

typedef struct {
  char *p;
  size_t len, cap;
} Buf;

static inline void buf_add(Buf *b, const void *data, size_t n) {
  if (b->len + n > b->cap) {
    b->cap = (b->len + n) * 2 + 256;
    b->p = must(realloc(b->p, b->cap));
  }
  memcpy(b->p + b->len, data, n);
  b->len += n;
}

static inline void buf_eat(Buf *b, size_t n) {
  memmove(b->p, b->p + n, b->len - n);
  b->len -= n;
}

static inline void buf_free(Buf *b) {
  free(b->p);
  memset(b, 0, sizeof *b);
}

// ---------------------------------------------------------------- HTTP/2

#define H2_PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#define H2_PREFACE_LEN 24
enum { F_DATA, F_HEADERS, F_PRIORITY, F_RST, F_SETTINGS, F_PUSH, F_PING, F_GOAWAY, F_WINDOW, F_CONT };
enum { END_STREAM = 1, ACK = 1, END_HEADERS = 4, PADDED = 8 };

static inline uint32_t get32(const unsigned char *p) {
  return (uint32_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3];
}

static inline void put32(unsigned char *p, uint32_t v) {
  p[0] = v >> 24, p[1] = v >> 16, p[2] = v >> 8, p[3] = v;
}

static inline void h2_frame(Buf *b, int type, int flags, uint32_t stream, const void *payload, size_t n) {
  unsigned char h[9] = {n >> 16, n >> 8, n, type, flags};
  put32(h + 5, stream);
  buf_add(b, h, 9);
  if (n) buf_add(b, payload, n);
}

static inline void h2_window(Buf *b, uint32_t stream, uint32_t n) {
  unsigned char p[4];
  put32(p, n);
  h2_frame(b, F_WINDOW, 0, stream, p, 4);
}

// A header field that enters no table: a name of the static table (index > 0) or a new one.
static inline void hpack(Buf *b, int index, const char *name, const char *value) {
  unsigned char n;
  if (index >= 15) {
    buf_add(b, "\x0f", 1), n = index - 15, buf_add(b, &n, 1);
  } else {
    n = index, buf_add(b, &n, 1);
  }
  if (!index) n = strlen(name), buf_add(b, &n, 1), buf_add(b, name, n);
  n = strlen(value), buf_add(b, &n, 1), buf_add(b, value, n);
}

#endif
