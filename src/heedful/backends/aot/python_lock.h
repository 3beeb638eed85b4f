// Python's lock, which the caller of a graph holds: threads of other batches need it meanwhile.
#pragma once

extern "C" {  // of Python's C interface, found in the process
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {
// Releases the lock for the lifetime of the object, if `releases` and the thread holds it.
class WithoutPythonLock {
 public:
  explicit WithoutPythonLock(bool releases = true)
      : state_(releases && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPythonLock() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  void* state_;
};
}  // namespace
