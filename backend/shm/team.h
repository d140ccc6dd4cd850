// Threads of one rank that share its large copies and reductions; none where it has one thread.
//
// A job is cut at cache lines into parts of like length, so that each element is computed by the same instructions as
// if one thread did all. The thread that has the job takes parts like the others do: a helper that sleeps, or has no
// core, holds nothing up. It ends when all parts are done. That wait has no deadline: a helper in a part copies or
// adds, and waits for nobody.
//
// A helper inherits the affinity mask of the thread that starts it, takes no signals, and is not there in a forked
// child, which takes all parts itself.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "os.h"
#include "reduce.h"
#include "team_size.h"

namespace c10d_custom {

class Team {
 public:
  ~Team();

  // So many threads, the caller's among them. Before the first job.
  void set_size(uint32_t threads) { size_ = threads; }

  // As many as team_size.h allows, which is asked at the first large call; of these, in each large call, so many as the
  // machine has idle cores for. Before the first job.
  void set_by_load(std::function<TeamSize()> size, long (*idle)() = idle_cores) {
    allowed_ = std::move(size), idle_ = idle;
  }

  // What follows is part of moving so many bytes: sharing pays for large calls only.
  void begin(uint64_t bytes) { now_ = bytes < kWorth ? 1 : idle_ ? size_by_load() : size_; }
  // How many threads share what follows.
  uint32_t size() const { return now_; }

  // f(from, to) for parts that are [0, bytes) together. For one thread at a time.
  template <class F>
  void share(uint64_t bytes, F f) {
    const uint32_t parts = now_ > 1 && bytes >= 2 * kLeast ? cut(bytes) : 1;
    if (parts < 2) return f(uint64_t(0), bytes);
    const uint64_t lines = (bytes + 63) / 64;
    auto part = [&](uint32_t i) {
      const uint64_t to = lines * (i + 1) / parts * 64;
      f(lines * i / parts * 64, to < bytes ? to : bytes);
    };
    run(parts, [](const void* context, uint32_t i) { (*static_cast<const decltype(part)*>(context))(i); }, &part);
  }

  // copy(to, from, bytes), shared.
  template <class Copy>
  void copy(const Copy& copy, void* to, const void* from, uint64_t bytes) {
    share(bytes, [&](uint64_t at, uint64_t end) {
      copy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, end - at);
    });
  }

  // The kernel, shared; an item's bytes divide a cache line's.
  void reduce(ReduceFn, void* to, const void* const* src, uint32_t nsrc, uint64_t bytes, uint64_t item,
              const double* factor);

 private:
  using Part = void (*)(const void* context, uint32_t i);

  uint32_t size_by_load();
  uint32_t cut(uint64_t bytes);
  void run(uint32_t parts, Part, const void* context);
  bool take_one();
  void help();

  static constexpr uint64_t kWorth = 1 << 20;   // bytes of a call
  static constexpr uint64_t kLeast = 16 << 10;  // bytes of a part

  uint32_t size_ = 1;
  uint32_t now_ = 1;  // of these, in this call
  std::function<TeamSize()> allowed_;
  long (*idle_)() = nullptr;  // null: the size is fixed
  uint32_t sharers_ = 1;
  std::vector<std::thread> helpers_;

  // The number of the job, above how many of its parts nobody has taken yet. Whoever takes one by exchanging this word
  // has read part_ and context_ of that very job: they change only between jobs.
  std::atomic<uint64_t> job_{0};
  std::atomic<Part> part_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<uint32_t> done_{0};  // parts of the job

  std::atomic<uint32_t> rings_{0}, sleepers_{0};
  std::atomic<bool> closing_{false};
};

}  // namespace c10d_custom
