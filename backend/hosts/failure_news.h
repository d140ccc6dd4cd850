// What a rank has to look at before it starts a transfer to another host: MPICH 5.0 crashes in a send to a process that
// is gone, once it has seen its connection end.
#pragma once
#include <poll.h>

#include <atomic>
#include <cstdint>

namespace c10d_custom {

struct FailureNews {
  int32_t unread;              // readable while the failure detector has news that it has not read; -1: there is none
  std::atomic<uint32_t> kept;  // set by the detector while it reads (`unread` goes quiet) and once a rank is gone
};

inline bool has_come(const FailureNews* news) {
  if (!news) return false;
  pollfd polled = {news->unread, POLLIN, 0};
  return (poll(&polled, 1, 0) > 0 && polled.revents & POLLIN) || news->kept.load(std::memory_order_acquire);
}

}  // namespace c10d_custom
