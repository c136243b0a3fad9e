// A team of threads for short jobs that follow each other closely.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tp {

// Parts first … last − 1 of `count` equal ones.
struct Share {
  int first, last, count;

  // What it is of 0 … n − 1, from `begin` to `end`; parts differ by at most one `grain`.
  void of(int64_t n, int64_t grain, int64_t& begin, int64_t& end) const;
};

// One thread's view of a job that all threads of a team run at once.
struct Member {
  int index, count;

  // Returns when all members have called it. std::bad_alloc where one has run out of memory and will not come.
  void barrier() const;

  // The contiguous part of 0 … n − 1 that this member works on; parts differ by at most one `grain`.
  void share(int64_t n, int64_t grain, int64_t& first, int64_t& last) const {
    Share{index, index + 1, count}.of(n, grain, first, last);
  }
};

int threads();
void set_threads(int n);

// Runs job(context, member) on every thread and returns when all are done. Callers take turns. A member that throws
// std::bad_alloc ends the job for all, at their next barrier; then it is thrown here.
void run(void (*job)(void*, const Member&), void* context);

template <class Job>
void run(Job&& job) {
  run([](void* context, const Member& me) { (*static_cast<Job*>(context))(me); }, &job);
}

// Shares of a job, of which a member takes the next one when it is done with one: processors are not always equally fast.
// Half of what is left, divided by the members, is the next share: large ones are read in long streams, and with small
// ones at the end all members are done at about the same time.
class Shares {
 public:
  // Calls work(share) with each share that the member takes.
  template <class Work>
  void take(const Member& me, Work&& work) {
    const int parts = me.count == 1 ? 1 : EACH * me.count;
    for (int first = taken_.load(std::memory_order_relaxed); first < parts;) {
      const int next = first + std::max(1, (parts - first) / (2 * me.count));
      if (!taken_.compare_exchange_weak(first, next, std::memory_order_relaxed)) continue;
      work(Share{first, next, parts});
      first = taken_.load(std::memory_order_relaxed);
    }
  }

  // For the next job; all members call it, between two barriers.
  void renew(const Member& me) {
    if (me.index == 0) taken_.store(0, std::memory_order_relaxed);
  }

 private:
  static constexpr int EACH = 16;  // parts for each member
  std::atomic<int> taken_{0};
};

// Memory of the calling thread, aligned to 64 bytes, whose content lasts until the same slot is asked for again.
enum Slot {
  SLOT_SCALES, SLOT_SCALES_TOO, SLOT_PRODUCTS, SLOT_PLAIN, SLOT_TILE, SLOT_SUMS, SLOT_SUMS_TOO, SLOT_PACKED, SLOT_INNER, SLOT_PACKED_INNER, SLOT_PIECES,
  SLOT_PICKED, SLOT_LAYER, SLOT_ATTENTION, SLOT_FEED_FORWARD, SLOT_EXPERTS, SLOT_SHARED, SLOT_COUNT
};
void* scratch(Slot slot, size_t bytes);

// Gives all of it back.
void drop_scratch();

}  // namespace tp
