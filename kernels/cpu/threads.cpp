#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tp {
namespace {

// About 50 µs on current processors: longer than the gaps between the operations of a token, too short to be noticed.
constexpr int SPINS = 1000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The processors that a control group grants, rounded up; 0 where it sets no limit.
int cgroup_limit() {
  double quota = 0, period = 0;
  if (FILE* f = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (std::fscanf(f, "%lf %lf", &quota, &period) != 2) quota = 0;
    std::fclose(f);
  }
  return quota > 0 && period > 0 ? static_cast<int>((quota + period - 1) / period) : 0;
}

constexpr long MOST = 1024;  // as in kernels/threads.py

int default_threads() {
  if (const char* wanted = std::getenv("OMP_NUM_THREADS")) {
    const long n = std::strtol(wanted, nullptr, 10);
    if (n > 0) return static_cast<int>(std::min(n, MOST));
  }
  cpu_set_t set;
  int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  const int limit = cgroup_limit();
  return std::max(1, limit ? std::min(n, limit) : n);
}

// Workers wait for `epoch` to change, do the job, and count themselves done.
class Team {
 public:
  explicit Team(int n) : process_(getpid()), size_(n) {
    try {
      for (int i = 1; i < n; i++) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {  // the system has no more threads to give
      dismiss();
      throw;
    }
  }

  ~Team() { dismiss(); }

  int size() const { return size_; }
  bool forked() const { return process_ != getpid(); }

  void run(void (*job)(void*, const Member&), void* context) {
    post(job, context);
    take_part(0);
    wait([this] { return done_.load(std::memory_order_acquire) == size_; });
    if (!failed_.exchange(false)) return;
    arrived_.store(0, std::memory_order_relaxed);  // some may have waited for one who never came
    throw std::bad_alloc();
  }

  void barrier() {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    } else {
      wait([this, round] { return failed() || round_.load(std::memory_order_acquire) != round; });
    }
    if (failed()) throw std::bad_alloc();
  }

 private:
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  void dismiss() {
    post(nullptr, nullptr);
    for (auto& worker : workers_) worker.join();
  }

  void post(void (*job)(void*, const Member&), void* context) {
    job_ = job;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load(std::memory_order_seq_cst)) wake_.notify_all();
  }

  void take_part(int index) {
    try {
      job_(context_, Member{index, size_});
    } catch (const std::bad_alloc&) {
      failed_.store(true, std::memory_order_release);
    }
    done_.fetch_add(1, std::memory_order_release);
  }

  // For what other members are busy with: yields where there are fewer processors than threads.
  template <class Ready>
  static void wait(Ready ready) {
    for (int i = 0; !ready(); i++) {
      if (i < SPINS) relax();
      else sched_yield();
    }
  }

  void work(int index) {
    for (unsigned seen = 0;;) {
      for (int i = 0; i < SPINS && epoch_.load(std::memory_order_acquire) == seen; i++) relax();
      if (epoch_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [this, seen] { return epoch_.load(std::memory_order_acquire) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (!job_) return;
      take_part(index);
    }
  }

  const pid_t process_;
  const int size_;
  void (*job_)(void*, const Member&) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<unsigned> epoch_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

std::mutex turn;
Team* team = nullptr;  // never destroyed at exit: other threads may still be in a job
int wanted_threads = 0;

// A child must not find the turn taken by a thread that it does not have.
[[maybe_unused]] const int at_fork = pthread_atfork([] { turn.lock(); }, [] { turn.unlock(); }, [] { turn.unlock(); });

Team& current_team() {
  if (!wanted_threads) wanted_threads = default_threads();
  // After a fork the threads are in the parent, and so is who waits for them: such a team can only be left as it is.
  if (team && team->forked()) team = nullptr;
  if (!team || team->size() != wanted_threads) {
    delete team;
    team = nullptr;
    team = new Team(wanted_threads);
  }
  return *team;
}

struct Buffers {
  void* data[SLOT_COUNT] = {};
  size_t size[SLOT_COUNT] = {};
  ~Buffers() {
    for (int slot = 0; slot < SLOT_COUNT; slot++) drop(slot);
  }

  void drop(int slot) {
    std::free(data[slot]);
    data[slot] = nullptr;
    size[slot] = 0;
  }
};

Buffers& own_buffers() {
  thread_local Buffers buffers;
  return buffers;
}

}  // namespace

void Member::barrier() const {
  if (count > 1) team->barrier();
}

void Share::of(int64_t n, int64_t grain, int64_t& begin, int64_t& end) const {
  const int64_t grains = (n + grain - 1) / grain;
  begin = std::min(n, grains * first / count * grain);
  end = std::min(n, grains * last / count * grain);
}

int threads() {
  std::lock_guard<std::mutex> lock(turn);
  return wanted_threads ? wanted_threads : wanted_threads = default_threads();
}

void set_threads(int n) {
  std::lock_guard<std::mutex> lock(turn);
  wanted_threads = std::max(1, n);
}

void run(void (*job)(void*, const Member&), void* context) {
  std::lock_guard<std::mutex> lock(turn);
  current_team().run(job, context);
}

void* scratch(Slot slot, size_t bytes) {
  Buffers& buffers = own_buffers();
  if (buffers.size[slot] < bytes) {
    buffers.drop(slot);
    const size_t size = (bytes + 4095) / 4096 * 4096;
    buffers.data[slot] = std::aligned_alloc(4096, size);
    if (!buffers.data[slot]) throw std::bad_alloc();
    buffers.size[slot] = size;
  }
  return buffers.data[slot];
}

void drop_scratch() {
  for (int slot = 0; slot < SLOT_COUNT; slot++) own_buffers().drop(slot);
}

}  // namespace tp
