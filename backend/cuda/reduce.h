// Reductions of several arrays into one or more: every target of a job gets the same result, and a launch does
// several jobs. No thread waits for another. A target may be exactly one of the sources of its own job;
// otherwise it must not overlap any array of the launch.
#pragma once
#include "vectors.h"

namespace c10d_custom {

struct Reduce {
  static constexpr u32 kMaxSources = 64, kMaxPlaces = 272, kMaxJobs = 16;

  // unit: 16: all addresses are `skew` past a multiple of 16, and a multiple of 16 lies between two
  // elements; otherwise skew is 0, and unit the largest of 1, 2, 4, 8 that all addresses are multiples of.
  struct Job {
    u64 bytes;
    u32 first, sources, targets;  // its arrays: place[first] and on, sources in their order, then targets
    u32 unit, skew;
  };
  struct Arguments {
    u8* place[kMaxPlaces];
    double factor[kMaxSources];  // PREMUL_SUM: of a job's j-th source
    Job job[kMaxJobs];
    u32 jobs;
  };

  // The grid is a multiple of the jobs: each has as many blocks.
  template <class R>
  C10D_DEVICE void run(const Arguments& a) {
    const u32 index = blockIdx.x / a.jobs, blocks = gridDim.x / a.jobs;
    const u64 thread = (u64)index * blockDim.x + threadIdx.x, threads = (u64)blocks * blockDim.x;
    do_job<R>(a, a.job[blockIdx.x % a.jobs], thread, threads);
  }

  // Vector v holds bytes 16 v - skew to 16 v - skew + 15 of the arrays: parts of them, if it is the
  // first or the last.
  template <class R>
  C10D_DEVICE void do_job(const Arguments& a, const Job& job, u64 thread, u64 threads) {
    constexpr u32 kVectors = R::Format::kItems < 16 ? 2 : 1;
    const u8* const* const source = a.place + job.first;
    u8* const* const target = a.place + job.first + job.sources;
    const auto factor = [&](u32 j) { return a.factor[j]; };
    const u64 end = job.skew + job.bytes, vectors = (end + 15) / 16;

    // Whole Vectors from `first` up to `last`; none if the arrays are not aligned.
    const u64 first = job.skew != 0, last = job.unit == 16 && end / 16 > first ? end / 16 : first;
#pragma unroll 1
    for (u64 v = first + thread; v < last; v += kVectors * threads) {
      Vector result[kVectors];
      fold_vectors<R, kVectors, 4>(
          result, job.sources,
          [&](u32 j, Vector* in) {
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
              if (i == 0 || v + i * threads < last) in[i] = load_vector(source[j] - job.skew + 16 * (v + i * threads));
            }
          },
          factor);
#pragma unroll 1
      for (u32 t = 0; t < job.targets; ++t) {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
          if (i == 0 || v + i * threads < last) store_vector(target[t] - job.skew + 16 * (v + i * threads), result[i]);
        }
      }
    }

    // The others: `first` in front, and those from `last` on.
#pragma unroll 1
    for (u64 k = thread; k < first + (vectors - last); k += threads) {
      const u64 v = k < first ? k : last + (k - first);
      const u32 low = v == 0 ? job.skew : 0, high = end - 16 * v < 16 ? (u32)(end - 16 * v) : 16;
      Vector result[1];
      fold_vectors<R, 1, 1>(
          result, job.sources,
          [&](u32 j, Vector* in) { in[0] = gather_vector(source[j] - job.skew + 16 * v, job.unit, low, high); },
          factor);
#pragma unroll 1
      for (u32 t = 0; t < job.targets; ++t) {
        scatter_vector(target[t] - job.skew + 16 * v, job.unit, low, high, result[0]);
      }
    }
  }
};

}  // namespace c10d_custom

// One kernel: C10D_INSTANCE(Reduce, float16, SUM) is c10d_Reduce_float16_SUM.
#define C10D_INSTANCE(ALGORITHM, DTYPE, OP)                                                           \
  C10D_KERNEL c10d_##ALGORITHM##_##DTYPE##_##OP(C10D_ARGUMENT(c10d_custom::ALGORITHM::Arguments) a) { \
    c10d_custom::ALGORITHM::run<c10d_custom::dtype_##DTYPE::OP>(a);                                   \
  }
