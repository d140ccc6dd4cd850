#include "mpi_driver.h"

#include <algorithm>

using namespace c10d_custom;

namespace {

constexpr int64_t kTick = 5 * 1000 * 1000;       // ns: between two looks while MPI is called, and just after
constexpr int64_t kSlowest = 250 * 1000 * 1000;  // once it has not been for long
constexpr int64_t kShare = 8;                    // of the time since then, the time between two looks

class Driver {
 public:
  int start(const MpiDriver& how) {
    how_ = how;
    pid_ = getpid();
    const int error = start_thread(thread_, [this] { run(); });
    if (!error) transfers.driven.store(1);
    return error;
  }

  void end() {
    if (pid_ != getpid() || !thread_.joinable()) return;
    transfers.driven.store(0);
    over_.store(true);
    transfers.asleep.store(0);
    futex_wake_all(&transfers.asleep);
    thread_.join();
  }

  bool runs_here() const { return pid_ == getpid() && thread_.joinable(); }

 private:
  void run() {
    uint32_t seen = transfers.calls.load();
    int64_t last = now_ns();
    while (!over_.load()) {
      const int64_t pause = std::clamp((now_ns() - last) / kShare, kTick, kSlowest);
      sleep(pause, seen);
      if (over_.load()) return;
      if (const uint32_t calls = transfers.calls.load(); calls != seen) {
        seen = calls;
        last = now_ns();
        continue;
      }
      int found = 0;
      alignas(16) char status[256];
      if (how_.iprobe(int(how_.source), int(how_.tag), how_.comm, &found, status))
        last = 0;  // MPI refuses: at the slowest rate from now on
    }
  }

  void sleep(int64_t ns, uint32_t seen) {
    if (ns <= kTick) {
      const timespec t = {0, long(ns)};
      nanosleep(&t, nullptr);
      return;
    }
    transfers.asleep.store(1);
    if (transfers.calls.load() == seen && !over_.load()) futex_wait(&transfers.asleep, 1, ns);
    transfers.asleep.store(0);
  }

  MpiDriver how_{};
  pid_t pid_ = 0;
  std::thread thread_;
  std::atomic<bool> over_{false};
};

// Never destroyed: the thread may outlive everything else of the process.
Driver* driver;

}  // namespace

int c10d_drive_mpi(const MpiDriver* how) {
  if (driver && driver->runs_here()) return 0;
  driver = new Driver;
  return driver->start(*how);
}

void c10d_end_mpi_driver() {
  if (driver) driver->end();
}

void c10d_transfer_begins() { transfer_begins(); }

void c10d_mpi_is_called() { mpi_is_called(); }
