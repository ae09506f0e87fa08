// A fixed set of threads that share out the blocks of one call at a time.
//
// The calling thread works too, so `num_threads` threads run in all. Blocks are taken from a
// counter, so a thread that the system slows down takes fewer of them; which thread runs a block
// never changes what the block computes. Callers from several threads are served one after the
// other. Threads sleep between calls: a spinning pool takes the cores that compute needs.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

class Pool {
 public:
  static constexpr int kMaxThreads = 1024;

  // Throws std::invalid_argument unless 1 <= num_threads <= kMaxThreads. The threads inherit
  // the processor affinity of the one that makes the pool.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls function(context, block) once for each block in [0, num_blocks), in no fixed order,
  // and returns when all are done. `function` must not throw. Throws std::runtime_error in a
  // child process of the one that made the pool (its threads were not forked) and after close().
  void run(int64_t num_blocks, void (*function)(void*, int64_t), void* context);

  // Ends and joins the threads. Doing it twice is harmless.
  void close();

 private:
  struct Job {
    void (*function)(void*, int64_t);
    void* context;
    int64_t num_blocks;
    std::atomic<int64_t> next{0};
  };
  // What the threads share; left alone in a forked child, where its locks may be held forever.
  struct Shared {
    std::mutex callers;  // held by the caller being served
    std::mutex mutex;    // guards everything below
    std::condition_variable start;
    std::condition_variable done;
    Job* job = nullptr;
    uint64_t generation = 0;
    int num_running = 0;
    bool closed = false;
    std::vector<std::thread> workers;
  };

  static void work(Shared* shared);
  static void take_blocks(Job* job);

  const int num_threads_;
  const pid_t owner_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace headrace
