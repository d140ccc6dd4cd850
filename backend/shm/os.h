// The system calls we live on: time, futexes shared between processes, threads; what short files of the kernel say.
#pragma once
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>

namespace c10d_custom {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// `from` + `delta` without overflow: a huge time-out means never, a negative one is over at once.
inline int64_t deadline_after(int64_t from, int64_t delta) {
  if (delta < 0) return from;
  return delta > INT64_MAX - from ? INT64_MAX : from + delta;
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Sleeps while *word == expected, for at most ns. Spurious returns are normal.
inline void futex_wait(const void* word, uint32_t expected, int64_t ns) {
  timespec t{time_t(ns / 1000000000), long(ns % 1000000000)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, nullptr, 0);
}

inline void futex_wake(const void* word, int most) { syscall(SYS_futex, word, FUTEX_WAKE, most, nullptr, nullptr, 0); }
inline void futex_wake_all(const void* word) { futex_wake(word, INT_MAX); }

// A file's contents; "" where it cannot be read.
inline std::string file_text(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string all;
  char part[4096];
  for (ssize_t got; (got = read(fd, part, sizeof part)) > 0;) all.append(part, size_t(got));
  close(fd);
  return all;
}

// The number after `key` where a line begins with it; false: there is none.
inline bool number_after(const std::string& text, const char* key, uint64_t* value) {
  const size_t length = strlen(key);
  for (size_t line = 0; line < text.size(); line = text.find('\n', line) + 1) {
    if (!text.compare(line, length, key)) {
      const char* const at = text.c_str() + line + length;
      char* end;
      *value = strtoull(at, &end, 10);
      return end != at;
    }
    if (text.find('\n', line) == std::string::npos) break;
  }
  return false;
}

// Threads that run or want to, of the whole machine; -1: not known.
inline long running_threads() {
  char text[128];
  const int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  const ssize_t got = read(fd, text, sizeof text - 1);
  close(fd);
  text[got > 0 ? got : 0] = 0;
  long running;
  return sscanf(text, "%*s %*s %*s %ld", &running) == 1 ? running : -1;
}

// Cores of the machine that nobody runs on; below 0: so many threads wait for one. Where it is not known, none.
inline long idle_cores() {
  const long running = running_threads();
  return running < 0 ? 0 : sysconf(_SC_NPROCESSORS_ONLN) - running;
}

// The application's first thread: the one that takes its signals.
inline bool main_thread() { return syscall(SYS_gettid) == getpid(); }

// Starts a thread that takes no signals: they belong to the application's own threads. 0, or errno.
template <class F>
int start_thread(std::thread& t, F f) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  try {
    t = std::thread(f);
  } catch (const std::system_error& e) {
    error = e.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

}  // namespace c10d_custom
