// How a process ends its part in an MPI job, by the code that it exits with: Python tells that to none of its exit
// handlers, libc's on_exit does.
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

#include "sequencer.h"

// What MPI_Finalize tells Hydra (PMI-1), without its wait for all ranks, one that may never come there among them.
C10D_API void c10d_tell_hydra(int32_t launcher) {
  constexpr int kPatienceMs = 2000;  // for the launcher on this host to answer
  const char word[] = "cmd=finalize\n";
  char answer[1024];
  pollfd heard = {launcher, POLLIN, 0};
  if (write(launcher, word, strlen(word)) > 0 && poll(&heard, 1, kPatienceMs) > 0) {
    if (read(launcher, answer, sizeof answer) < 0) return;
  }
}

namespace {

// MPI's functions. An MPI_Comm is an int or a pointer, and either passes for an intptr_t.
struct Job {
  int (*finalize)();
  int (*abort)(intptr_t, int);
  int (*finalized)(int*);
  intptr_t world;
  int64_t forward_ns;  // for the launcher to forward what was written, before MPI_Abort ends it too
  int launcher;        // Hydra's end of the process; -1: another launcher, and MPI_Finalize
  pid_t pid;
} job;

void end(int status, void*) {
  int over = 1;
  if (getpid() != job.pid || job.finalized(&over) || over) return;
  if (status == 0) {
    job.launcher < 0 ? void(job.finalize()) : c10d_tell_hydra(job.launcher);
    return;
  }
  timespec left = {job.forward_ns / 1000000000, job.forward_ns % 1000000000};
  while (nanosleep(&left, &left)) continue;
  job.abort(job.world, status & 255);
}

}  // namespace

// Called as the interpreter ends. Handlers that libc has been given before run after this one.
C10D_API void c10d_end_mpi_at_exit(void* finalize, void* abort, void* finalized, int64_t world, int64_t forward_ns,
                                   int32_t launcher) {
  const bool again = job.pid == getpid();
  job = {reinterpret_cast<int (*)()>(finalize),
         reinterpret_cast<int (*)(intptr_t, int)>(abort),
         reinterpret_cast<int (*)(int*)>(finalized),
         static_cast<intptr_t>(world),
         forward_ns,
         launcher,
         getpid()};
  if (!again) on_exit(end, nullptr);
}
