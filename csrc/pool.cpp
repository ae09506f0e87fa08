#include "pool.h"

#include <fenv.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace headrace {
namespace {

// IEEE arithmetic whatever the process has set: rounding to nearest, subnormals kept (other
// libraries set flush-to-zero, and threads inherit it).
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  fenv_t saved_;
};

}  // namespace

Pool::Pool(int num_threads)
    : num_threads_(num_threads), owner_(getpid()), shared_(std::make_unique<Shared>()) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                "; a pool has 1 to " + std::to_string(kMaxThreads) + " threads");
  }
  try {
    for (int i = 1; i < num_threads; ++i) {
      shared_->workers.emplace_back(work, shared_.get());
    }
  } catch (...) {  // the system's limit on threads: end those that started
    close();
    throw;
  }
}

Pool::~Pool() {
  if (getpid() != owner_) {
    shared_.release();  // threads and lock holders exist in the parent only
    return;
  }
  close();
}

void Pool::close() {
  if (getpid() != owner_) {
    return;
  }
  std::lock_guard<std::mutex> serve(shared_->callers);
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->closed = true;
  }
  shared_->start.notify_all();
  for (std::thread& worker : shared_->workers) {
    worker.join();
  }
  shared_->workers.clear();
}

void Pool::run(int64_t num_blocks, void (*function)(void*, int64_t), void* context) {
  if (getpid() != owner_) {
    throw std::runtime_error(
        "this pool was made before the process forked, and its threads stayed with the parent; "
        "make a new pool here, or start the process with the 'spawn' method");
  }
  std::lock_guard<std::mutex> serve(shared_->callers);
  Job job{function, context, num_blocks};
  const bool shared_out = num_blocks > 1 && !shared_->workers.empty();
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    if (shared_->closed) {
      throw std::runtime_error("this pool is closed; make a new one");
    }
    if (shared_out) {
      shared_->job = &job;
      shared_->num_running = static_cast<int>(shared_->workers.size());
      ++shared_->generation;
    }
  }
  if (shared_out) {
    shared_->start.notify_all();
  }
  take_blocks(&job);
  if (shared_out) {
    // The job lives on this stack: no thread may still hold it when this returns.
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->done.wait(lock, [this] { return shared_->num_running == 0; });
    shared_->job = nullptr;
  }
}

void Pool::take_blocks(Job* job) {
  DefaultFloatEnvironment environment;
  for (int64_t block = job->next.fetch_add(1, std::memory_order_relaxed);
       block < job->num_blocks; block = job->next.fetch_add(1, std::memory_order_relaxed)) {
    job->function(job->context, block);
  }
}

void Pool::work(Shared* shared) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(shared->mutex);
  for (;;) {
    shared->start.wait(lock, [&] { return shared->closed || shared->generation != seen; });
    if (shared->closed) {
      return;
    }
    seen = shared->generation;
    Job* job = shared->job;
    lock.unlock();
    take_blocks(job);
    lock.lock();
    if (--shared->num_running == 0) {
      shared->done.notify_one();
    }
  }
}

}  // namespace headrace
