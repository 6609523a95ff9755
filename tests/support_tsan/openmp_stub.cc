// A sequential OpenMP for thread sanitizer builds, linked into every test there. oneDNN is built on
// GNU OpenMP, whose synchronisation the sanitizer can not see, so that it reports races that do not
// exist. The executable's symbols come before libgomp's at load time: every parallel region runs on
// the thread that meets it, which is how Lacuna calls oneDNN anyway. Needs -rdynamic.

extern "C" {

using Region = void (*)(void*);

void GOMP_parallel(Region region, void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  region(data);
}
void GOMP_barrier() {}
void GOMP_critical_start() {}
void GOMP_critical_end() {}
void GOMP_critical_name_start(void** /*name*/) {}
void GOMP_critical_name_end(void** /*name*/) {}
bool GOMP_single_start() { return true; }

int omp_get_max_threads() { return 1; }
int omp_get_num_threads() { return 1; }
int omp_get_thread_num() { return 0; }
int omp_in_parallel() { return 0; }
void omp_set_num_threads(int /*num_threads*/) {}
int omp_get_dynamic() { return 0; }
void omp_set_dynamic(int /*dynamic*/) {}

}  // extern "C"
