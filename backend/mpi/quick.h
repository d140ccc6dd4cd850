// The short way of a small all_reduce over hosts: what is to be done before and after direct.h's, in one call. What Python
// takes for that is many times as long, and where ranks share a core it is paid by one after the other.
#pragma once
#include "../shm/api.h"
#include "direct.h"
#include "turn.h"

namespace c10d_custom {

constexpr uint32_t kLengths = 5;     // of payloads, for each of which there are requests
constexpr uint32_t kRedopRoom = 16;  // more than there are

// Of one group, in Python's memory.
struct DirectQuick {
  Turn turn;
  std::atomic<uint64_t> runner;    // the thread (pthread_self) that is in a call; 0: none
  std::atomic<uint32_t> stopped;   // the group is of no more use
  uint32_t limit;                  // bytes of the largest tensor
  uint64_t lengths[kLengths];      // ascending, the last at least `limit`
  const Direct* way;
  DirectReduce* const* calls;      // at [dtype][redop][index of the length]; null: not prepared
  DirectReduce* now;               // the call under way
  int64_t began;
  // The last calls. A record whose number is 0 is being written.
  TraceRecord* log;
  uint64_t logged, room;
};

}  // namespace c10d_custom

// What c10d_direct_quick returns beside a Status.
constexpr int kLongWay = 32;   // nothing was begun: to be done the long way
constexpr int kDoneWake = 33;  // done, and somebody waits for the turn

// In place. kind: as of c10d_all_reduce. kOk and kDoneWake: done. kPending, kMismatch and kUsage: as of c10d_direct_reduce
// with `now`; the turn is kept, and given back by c10d_direct_over, once.
C10D_API int c10d_direct_quick(c10d_custom::DirectQuick*, void* data, uint64_t count, uint32_t kind, int64_t ns);
C10D_API int c10d_direct_over(c10d_custom::DirectQuick*, int status);
// Writes up to `room` records, in no order. Returns how many.
C10D_API uint64_t c10d_direct_log(const c10d_custom::DirectQuick*, c10d_custom::TraceRecord* out);
