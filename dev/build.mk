# build.mk: the part of the Makefile for tests, measurements and developers, included by it: programs under test, the
# emulator, the ladders, checks of CUDA code without a GPU, builds for other processors.

# ---------------------------------------------------------------------------------------------------------------------
# 1. Programs for tests and measurements, once per storage dtype

$(B)/test_train-%: test_train.cu train.cu $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DPRECISION_$* -I. -x c $< -o $@ $(LIBS)
OF_DTYPE = $(CC) $(CFLAGS) -DPRECISION_$* -I. $< -o $@ $(LIBS)
$(B)/test_model-%: dev/test/test_model.c $(HEADERS) | $(B)
	$(OF_DTYPE)
$(B)/test_parts-%: dev/test/test_parts.c $(HEADERS) | $(B)
	$(OF_DTYPE)
$(B)/test_runs-%: dev/test/test_runs.c train.cu $(HEADERS) | $(B)
	$(OF_DTYPE)
$(B)/model_dump-%: dev/test/model_dump.c $(HEADERS) | $(B)
	$(OF_DTYPE)
$(B)/test_kernels-%: dev/test/test_kernels.c $(HEADERS) | $(B)
	$(OF_DTYPE)
$(B)/golden-%: dev/test/golden.c $(HEADERS) | $(B)
	$(OF_DTYPE)
$(B)/bench-%: dev/bench/bench.c $(HEADERS) | $(B)
	$(OF_DTYPE)
$(PRECISIONS:%=$(B)/bench-cuda-%): $(B)/bench-cuda-%: dev/bench/bench.c $(CUDA_HEADERS) | $(B)
	$(NVCC) $(NVCCFLAGS) $(NVCCARCH) -DPRECISION_$* -x cu $< -o $@ $(NVCCLIBS)
$(B)/published: dev/bench/published.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(B)/gemm-amx: dev/bench/gemm.c $(HEADERS) | $(B)
	$(CC) $(CFLAGS) -DGEMM_EMULATE_AMX -I. $< -o $@ $(LIBS)
$(B)/test_grpo: examples/grpo.c
$(B)/test_supervise: launch/supervise.c | $(B)/supervise
$(B)/test_watch: | $(B)/watch $(B)/tokenize
# A library of the GPU driver that answers what a script says, and one of an old driver.
FAKE_NVML := $(if $(filter Linux,$(shell uname -s)),$(patsubst %,$(B)/%/libnvidia-ml.so.1,fake_nvml fake_nvml_old))
$(FAKE_NVML): dev/test/fake_nvml.c
	@mkdir -p $(@D)
	$(CC) -shared -fPIC $(if $(filter %_old/,$(dir $@)),-DFAKE_OLD) -Wl,-soname,$(@F) $< -o $@
$(B)/test_telemetry: | $(FAKE_NVML) $(B)/supervise

# Tests that compute little take longer to optimize than to run. The code that they share with the trainer is tested at
# full optimization by golden-FP32, test_kernels-FP32, and all tests that run train-FP32 and train-BF16.
QUICK := golden-BF16 distill grpo reward $(foreach t,model runs,$(PRECISIONS:%=test_$t-%))
QUICKEST := test_files test_offload test_gguf test_convert test_trace test_evaluate test_plan test_optimizers \
    test_optimizers_matrix test_telemetry test_nf4 test_preferences test_report test_schedule test_seams test_sft \
    test_text test_tfevents test_zero test_calls test_facts test_watch soak pairs first test_generate \
    test_grpo test_lora test_kernels-BF16 test_kernels-FP16 \
    $(foreach t,parts train,$(PRECISIONS:%=test_$t-%))
$(QUICK:%=$(B)/%): CFLAGS := $(CFLAGS:-O3=-O1)
$(QUICKEST:%=$(B)/%): CFLAGS := $(CFLAGS:-O3=-Og)
# Under the address sanitizer the trainer, which tests start hundreds of times, has no check of pointers that overflow;
# test_runs and test_train, which contain it, have that check. With -O1 it takes three times as long to compile
# as with -Og, and a fifth less to run.
ifneq ($(findstring sanitize=address,$(OPTIMIZE)),)
$(B)/train-FP32 $(B)/train-BF16: CFLAGS += -fno-sanitize=pointer-overflow
endif

# Programs whose calls of the C library test_calls sees and makes fail (dev/test/fail_calls.h), where that is glibc; not
# once more in other builds.
GLIBC := $(shell $(CC) -E -dM -include stdlib.h -x c /dev/null 2>/dev/null | grep -c 'define __GLIBC__')
CALLS := $(if $(filter build-1,$(B)-$(GLIBC)),$(addprefix $(B)/calls/,corpus tokenize train supervise export generate \
    tensorboard))
CALLS_MORE := $(CALLS) $(if $(CALLS),$(B)/calls/evaluate)
$(CALLS_MORE): $(B)/calls/%: dev/test/fail_calls.h $(HEADERS) $(wildcard *.cu tools/*.c* data/*.c launch/*.c)
	@mkdir -p $(@D)
	$(CC) -std=c11 -O0 $(TUNE) -ffp-contract=off $(OPENMP) -pthread -DPRECISION_FP32 -I. \
	    -include $< -x c $(wildcard $*.cu tools/$*.c tools/$*.cu data/$*.c launch/$*.c) -x none -o $@ $(UNPACK) $(LIBS)

# ---------------------------------------------------------------------------------------------------------------------
# 2. CUDA on the CPU (dev/emulator/README.md): sources are translated to C++ under build/emulated, and compiled with the
# emulator, against the headers of the CUDA toolkit or, without one, against stand-ins.

CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
CXX_FOUND := $(shell command -v $(CXX) 2>/dev/null)
CUDA_INCLUDE := $(if $(wildcard $(CUDA_HOME)/include/cuda_runtime.h),-isystem $(CUDA_HOME)/include \
    -isystem $(CUDA_HOME)/include/cccl)
EMULATE := -std=c++20 -fno-strict-aliasing -ffp-contract=fast -Wall -Wextra -Werror -Wno-unknown-pragmas \
    -Wno-missing-field-initializers -pthread -DLLMTRAIN_CUDA -DLLMTRAIN_NCCL -I$(B)/emulated -I. -Idev/emulator \
    $(or $(CUDA_INCLUDE),-isystem dev/emulator/standins)
EMULATOR := $(wildcard dev/emulator/*.h dev/emulator/standins/*.h)
TRANSLATED := $(patsubst %,$(B)/emulated/%,$(wildcard *.h *.cuh *.cu \
    $(foreach d,llmtrain/* llmtrain/*/*,$(d)/*.h $(d)/*.cuh) tools/*.h tools/tune.cu \
    dev/*.cu dev/ladder.h dev/bench/*.h dev/gpu/*.cu dev/test/*.cu))
EMULATED_NEEDS := $(TRANSLATED) $(EMULATOR) $(HEADERS)
.SECONDARY: $(TRANSLATED)
$(B)/translate: dev/emulator/translate.cpp | $(B)
	$(CXX) -std=c++20 -O1 $(WARNINGS) $< -o $@
$(B)/emulated/%: % $(B)/translate
	@mkdir -p $(@D)
	@$(B)/translate $< > $@.new && mv $@.new $@
# The test contains the whole trainer, and acts as the trainer under this name, so that it is not compiled twice.
$(PRECISIONS:%=$(B)/train-emulated-%): $(B)/train-emulated-%: $(B)/test_train-emulated-%
	@ln -f $< $@
$(PRECISIONS:%=$(B)/test_train-emulated-%): $(B)/test_train-emulated-%: $(EMULATED_NEEDS)
	$(CXX) -O1 -fopenmp $(EMULATE) -DPRECISION_$* -x c++ $(B)/emulated/test_train.cu -o $@
$(PRECISIONS:%=$(B)/test_model-emulated-%): $(B)/test_model-emulated-%: dev/test/test_model.c $(EMULATED_NEEDS)
	$(CXX) -O1 -fopenmp $(EMULATE) -DPRECISION_$* -x c++ $< -o $@
$(B)/bench-emulated-BF16: dev/bench/bench.c $(EMULATED_NEEDS)
	$(CXX) -O0 -fopenmp $(EMULATE) -DPRECISION_BF16 -x c++ $< -o $@
$(B)/test_cublaslt $(B)/test_nccl $(B)/test_tune: $(B)/%: dev/emulator/%.cu $(EMULATED_NEEDS)
	@mkdir -p $(B)/emulated/dev/emulator
	$(B)/translate $< > $(B)/emulated/$<
	$(CXX) $(if $(filter %tune,$@),-O0,-O1) -fopenmp $(EMULATE) -x c++ $(B)/emulated/$< -o $@

# The test of all kernels, and the ladders as one program, as build/emulated-BUILD-PRECISION-NAME: plain, under the
# sanitizers, and with the race check. The last two builds check memory accesses, which are the same for both 16-bit
# dtypes; for ladders one dtype is enough. make test has the kernels in two dtypes; make test-more has the rest.
LADDERS := adamw attention_backward attention_forward classifier columns embedding exact_add gelu global_norm heads \
    layernorm leaves matmul muon nf4 optimizers qk_norm rope
EMULATED := $(addprefix $(B)/emulated-,plain-BF16-test_cuda plain-BF16-ladders)
EMULATED_MORE := $(addprefix $(B)/emulated-,plain-FP32-test_cuda plain-FP32-ladders plain-FP16-test_cuda \
    asan-BF16-test_cuda race-BF16-test_cuda $(foreach b,asan race,$b-FP32-test_cuda $b-BF16-ladders))
TYPE_AND_SOURCE = -DPRECISION_$(word 1,$(subst -, ,$*)) -x c++ \
    $(B)/$(if $(filter %-test_cuda,$*),emulated/dev/test/)$(word 2,$(subst -, ,$*)).cu
$(EMULATED) $(EMULATED_MORE): $(EMULATED_NEEDS) $(B)/ladders.cu
$(B)/emulated-plain-%:
	$(CXX) -O1 -fopenmp $(EMULATE) $(TYPE_AND_SOURCE) -o $@
# Optimizing the code that the sanitizers add takes longer than running it. What is cut into pieces is cut into small
# ones where memory is checked (LLMTRAIN_PIECE), here and in make sanitize.
SMALL_PIECES := -include dev/test/small_pieces.h
# The address sanitizer finds an access by a null pointer, or beyond an object, without the other one's checks for the
# same, which take a quarter of the time of compiling.
ADDRESSES := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize=null,object-size
$(B)/emulated-asan-%:
	$(CXX) -O0 -g1 $(ADDRESSES) $(EMULATE) $(SMALL_PIECES) $(TYPE_AND_SOURCE) -o $@
RACE_OPTIONS := -g1
define RACE_BUILD
$(CXX) -O1 -fno-pie $(RACE_OPTIONS) -DEMULATE_RACE -fsanitize=thread $(EMULATE) -c $(TYPE_AND_SOURCE) -o $@.o
$(CXX) -no-pie $@.o -o $@ -ldl
@rm $@.o
endef
$(B)/emulated-race-%:
	$(RACE_BUILD)
# The same, for counting memory accesses of kernels: structs must stay whole, which makes it run half as long again, and
# lines of inlined functions are reported.
$(B)/emulated-count-%: RACE_OPTIONS := -g -fno-tree-sra
$(B)/emulated-count-%:
	$(RACE_BUILD)
COUNTED := $(foreach t,BF16 FP32,$(B)/emulated-count-$t-ladders $(B)/emulated-count-$t-test_cuda)
$(COUNTED): $(EMULATED_NEEDS) $(B)/ladders.cu

# All ladders as one source, since most of the compile time goes into their common headers. The program's first argument
# names the ladder: build/emulated-plain-BF16-ladders adamw --parameters 1027.
$(B)/ladders.cu: dev/build.mk | $(B)
	@{ echo '#include "kernels.cuh"'; echo '#include "dev/ladder.h"'; echo '#define main ladder_main'; \
	  $(foreach l,$(LADDERS),echo 'namespace ladder_of_$(l) {'; echo '#include "dev/$(l).cu"'; echo '}';) \
	  echo '#undef main'; echo 'int main(int argc, char** argv) {'; \
	  $(foreach l,$(LADDERS),echo '    if (argc > 1 && strcmp(argv[1], "$(l)") == 0)'; \
	    echo '        return ladder_of_$(l)::ladder_main(argc - 1, argv + 1);';) \
	  echo '    puts("usage: ladders NAME FLAG...; NAME is one of: $(LADDERS)");'; echo '    return 2;'; echo '}'; } > $@

# ---------------------------------------------------------------------------------------------------------------------
# 3. CUDA code compiled by nvcc, all of it without a warning: resources.sh compiles the shipped kernels for sm_80,
# sm_90a and sm_100 and checks their machine code; nvcc-code compiles sources with other kernels, for all three from the
# virtual architecture of sm_80; nvcc-syntax checks the syntax of the rest, for sm_80 and sm_90a. Host code does not run
# here, so it is not optimized. make test checks the syntax; make test-more does the rest.

NVCC_CHECK := $(NVCC) $(filter-out -O3,$(NVCCFLAGS)) -Werror all-warnings -c -o /dev/null
NVCC_NAME = $(word 2,$(subst -, ,$*))
NVCC_SOURCE = -DPRECISION_$(word 1,$(subst -, ,$*)) -x cu $(wildcard \
    $(addsuffix /$(NVCC_NAME).cu,. dev/emulator dev/test tools $(B)) $(addsuffix /$(NVCC_NAME).c,dev/bench dev/test))
SYNTAX := FP32-test_train BF16-test_train BF16-test_nccl BF16-bench $(TOOLS:%=BF16-%) BF16-ladders
SYNTAX_MORE := FP16-test_train $(foreach t,BF16 FP16,$t-test_model $t-test_runs) FP32-ladders
CODE_MORE := BF16-ladders BF16-test_emulator
COMPILED := $(if $(NVCC_FOUND),$(SYNTAX:%=$(B)/nvcc-syntax-%.ok))
COMPILED_MORE := $(if $(NVCC_FOUND),$(SYNTAX_MORE:%=$(B)/nvcc-syntax-%.ok) $(CODE_MORE:%=$(B)/nvcc-code-%.ok) \
    $(B)/resources-BF16.txt $(B)/resources-FP32.txt $(B)/resources-FP16.txt)
$(filter %.ok,$(COMPILED) $(COMPILED_MORE)): $(CUDA_HEADERS) dev/bench/bench.c $(B)/ladders.cu \
    dev/test/test_model.c dev/test/test_runs.c $(wildcard *.cu dev/*.cu dev/test/*.cu dev/emulator/*.cu tools/*.cu)
$(B)/nvcc-syntax-%.ok:
	$(NVCC_CHECK) -fdevice-syntax-only $(foreach a,80 90a,-gencode arch=compute_$(a),code=sm_$(a)) $(NVCC_SOURCE)
	@touch $@
$(B)/nvcc-code-%.ok:
	$(NVCC_CHECK) $(foreach a,80 90a 100,-gencode arch=compute_80,code=sm_$(a)) $(NVCC_SOURCE)
	@touch $@
# Block sizes are the same in both 16-bit builds; those of FP32 come from __launch_bounds__.
$(B)/launches-%: $(EMULATED_NEEDS)
	$(CXX) -O0 -fopenmp $(EMULATE) -DPRECISION_$* -x c++ $(B)/emulated/dev/gpu/launches.cu -o $@
# One 16-bit type shows what the GPUs with 100 KB of shared memory get.
$(B)/resources-FP16.txt: export ARCHS := sm_80 sm_89 sm_90a sm_100 sm_120
RESOURCES_NEED := dev/gpu/resources.sh dev/gpu/machine_code.py dev/test/test_cuda.cu $(B)/launches-BF16 $(CUDA_HEADERS)
$(B)/resources-%.txt: $(RESOURCES_NEED) | $(B)
	@NVCC=$(NVCC) OUT=$(B)/machine-code-$*.jsonl LAUNCHES=$(if $(filter FP32,$*),,$(B)/launches-BF16) \
	    sh dev/gpu/resources.sh $* > $@.new || { tail -n 20 $@.new; exit 1; }
	@mv $@.new $@ && echo "$@: $$(grep '^skipped' $@)$$(tail -n 1 $@)"

# ---------------------------------------------------------------------------------------------------------------------
# 4. The same bits on every processor: golden for each instruction set that this machine can run, with each compiler, at
# different optimization levels; and checks of the GEMM kernels that this machine would not choose by itself.

MACHINE := $(shell $(CC) -march=native -dM -E -x c /dev/null 2>/dev/null)
# gcc knows these names since version 11, clang since 12.
NAMED := $(shell echo | $(CC) -march=x86-64-v2 -E -x c - > /dev/null 2>&1 && echo yes)
ISAS := $(if $(NAMED),$(if $(findstring __SSE4_2__,$(MACHINE)),x86-64-v2) \
    $(if $(findstring __AVX2__,$(MACHINE)),x86-64-v3) $(if $(findstring __AVX512VL__,$(MACHINE)),x86-64-v4))
LESSER_ISAS := $(filter-out %-v4,$(ISAS))
ISA_TESTS := $(LESSER_ISAS:%=$(B)/gemm-%) \
    $(if $(shell command -v aarch64-linux-gnu-gcc 2>/dev/null),$(B)/golden-aarch64 $(B)/gemm-aarch64)
STRICT := -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -I.
FOR_ISA = $(CC) $(STRICT) -march=x86-64-$* -DGEMM_KERNELS='"$(GEMM_KERNELS_x86-64-$*)"' $(OPENMP) $< -o $@ \
    -pthread $(LIBS)
$(B)/golden-x86-64-%: dev/test/golden.c $(HEADERS) | $(B)
	$(FOR_ISA) $(if $(filter v3,$*),-O2,-O1)
$(B)/gemm-x86-64-%: dev/bench/gemm.c $(HEADERS) | $(B)
	$(FOR_ISA) -O3
$(B)/bench-x86-64-%: dev/bench/bench.c $(HEADERS) | $(B)
	$(FOR_ISA) -O3
$(B)/golden-clang: dev/test/golden.c $(HEADERS) | $(B)
	clang $(STRICT) -O3 -march=native -Wno-unknown-pragmas $< -o $@ -pthread $(LIBS)
$(B)/golden-aarch64: dev/test/golden.c $(HEADERS) | $(B)
	aarch64-linux-gnu-gcc $(STRICT) -O1 -static -Wno-unknown-pragmas $< -o $@ -pthread $(LIBS)
# The kernel with BFMMLA, which qemu supports.
$(B)/gemm-aarch64: dev/bench/gemm.c $(HEADERS) | $(B)
	aarch64-linux-gnu-gcc $(STRICT) -O2 -static -Wno-unknown-pragmas -DGEMM_CHECK_EVERY=17 $< -o $@ -pthread $(LIBS)

# ---------------------------------------------------------------------------------------------------------------------
# 5. Tests

# SKIP=names leaves tests, and programs that it names, out of make test-more and make sanitize: .ci/run says why.
export SKIP
NOT_SKIPPED = $(filter-out $(SKIP:%=$(B)/%),$(1))
# Checks of sources, of what is installed, of bits: in a build with sanitizers they would find the same, or are of
# pieces of ordinary size.
PROGRAMS_CHECKS := golden compilers inlined tour single install chat_path floors export_runs
PROCESSES_CHECKS := same_weights
# With sanitizers it would take as long as all others; test_runs has its kills.
SOAK := soak
TESTS := $(filter-out $(SKIP),gemm test_files test_offload test_data test_tokenizer test_template test_convert \
    test_gguf test_evaluate test_plan test_text test_chat test_sft test_preferences test_corpus test_errors test_trace \
    test_watch test_report test_optimizers test_optimizers_matrix test_telemetry test_comm test_zero test_schedule \
    test_seams test_lora test_ranks test_tfevents test_supervise $(SOAK) pairs first \
    $(if $(CALLS),test_calls) test_grpo test_nf4 test_generate test_facts test_runs-FP32 \
    $(foreach t,FP32 BF16,test_parts-$t test_kernels-$t test_train-$t test_model-$t))
# For tests of processes that connect, train, die and stop.
RANKS_TESTS := $(addprefix $(B)/,test_comm test_zero test_ranks weights_hash train-FP32 train-BF16 generate-FP32 \
    export evaluate-FP32 plan-BF16 corpus tokenize tensorboard report figures $(if $(MPICC),train-mpi-FP32))
CPU_TESTS := $(TESTS:%=$(B)/%) $(call NOT_SKIPPED,$(B)/gemm-amx $(RANKS_TESTS)) $(CALLS) \
    $(if $(PROGRAMS_CHECKS),$(addprefix $(B)/,golden-FP32 golden-BF16 bench-FP32 llmtrain_single.h))
# The programs whose flags have rows in dev/test/pairs.txt.
PAIRED := $(addprefix $(B)/,pairs supervise train-FP32 train-BF16 plan-BF16 generate-FP32 evaluate-FP32 export \
    watch tensorboard report tokenize corpus)
KERNELS_TESTS := $(EMULATED) $(B)/bench-emulated-BF16
# The programs for comparing the trainers of a dtype.
TRAINERS_OF = $(addprefix $(B)/,corpus tokenize weights_hash \
    $(addsuffix -$(1),train train-emulated test_train-emulated))
RUNS_TESTS := $(call TRAINERS_OF,FP32) $(addprefix $(B)/,test_cublaslt test_nccl launches-BF16) $(COMPILED)
TEST_PARTS := cpu-programs cpu-processes cuda-kernels cuda-runs alone

.PHONY: test-cpu test-cpu-programs test-cpu-processes test-cpu-only test-cuda test-cuda-kernels test-cuda-runs \
    test-more test-more-cpu test-more-cuda test-ranks test-pairs test-calls test-posix test-posix-suites soak sanitize \
    races test-races test-races-comm test-races-runs mutants coverage fuzz peers-tokenizers emulated sectors bounds \
    bench tour bench-axes bench-checkpoint plan-published

##@ Tests
## test-cpu: the half of make test without CUDA
# Processes that wait for each other run while other tests compute.
PROCESS_TESTS := test_comm test_ranks test_supervise $(SOAK) pairs
test-cpu: test-cpu-programs test-cpu-processes
test-cpu-programs: $(CPU_TESTS)
	@sh dev/test/test.sh cpu-programs $(B) "$(CC)" $(filter-out $(PROCESS_TESTS),$(TESTS)) $(PROGRAMS_CHECKS)
test-cpu-processes: $(CPU_TESTS)
	@sh dev/test/test.sh cpu-processes $(B) "$(CC)" \
	    $(filter-out $(SKIP),$(PROCESS_TESTS) machines $(PROCESSES_CHECKS))
test-cpu-only: test-cpu
	@rm -f $(B)/test-cuda-*.sum
	@echo "skipped the tests of CUDA: there is no $(CXX); apt-get install -y g++"

## test-cuda: the other half: CUDA only, run on the CPU
## test-cuda-kernels: its first part: every kernel in many orders of threads
## test-cuda-runs: its second part: the libraries, the trainer, nvcc
test-cuda: test-cuda-kernels test-cuda-runs
TEST_EMULATED = sh dev/test/test_emulated.sh $(1) $(B) "$(CUDA_INCLUDE)" $(if $(COMPILED),yes,no) "$(LADDERS)"
test-cuda-kernels: $(KERNELS_TESTS)
	@$(call TEST_EMULATED,kernels) $(EMULATED)
test-cuda-runs: $(RUNS_TESTS)
	@$(call TEST_EMULATED,runs)

## test-more: longer tests: FP16, other ISAs, examples, ladders under sanitizers, the emulator's own, macOS
MORE_CUDA := $(call NOT_SKIPPED,$(EMULATED_MORE) $(call TRAINERS_OF,BF16) $(COMPILED_MORE) $(addprefix $(B)/, \
    test_model-emulated-FP32 test_model-emulated-BF16 emulated-plain-BF16-ladders test_tune))
test-more-cuda: $(MORE_CUDA)
	@$(call TEST_EMULATED,more) $(call NOT_SKIPPED,$(EMULATED_MORE))
MORE_CPU := $(filter-out $(SKIP),reward grpo distill $(ISAS:%=golden-%) test_kernels-FP16 test_train-FP16 \
    test_model-FP16 test_runs-FP16 test_runs-BF16 $(if $(shell command -v clang 2>/dev/null),golden-clang))
MORE_CHECKS := $(filter-out $(SKIP),other_isas macos $(foreach s,1 2 3 4,more_pairs-$s) layouts gpu_check include)
test-more-cpu: $(MORE_CPU:%=$(B)/%) $(PAIRED) $(B)/test_ranks $(call NOT_SKIPPED,$(ISA_TESTS))
	@sh dev/test/test.sh more $(B) "$(CC)" $(MORE_CPU) $(MORE_CHECKS)
test-more: test-more-cpu $(if $(CXX_FOUND),test-more-cuda) $(LESSER_ISAS:%=$(B)/bench-%)
	@sh dev/test/test.sh more-alone $(B) "$(CC)" $(LESSER_ISAS:%=cliffs-%)

## test-ranks: several ranks: the transport, whole runs, faults, several machines; a part of test-cpu
test-ranks: $(RANKS_TESTS)
	@sh dev/test/test.sh ranks $(B) "$(CC)" test_comm test_zero test_ranks machines

## test-calls: every call of the C library fails once in every job, from several callers
test-calls: $(CALLS_MORE) $(B)/test_calls
	@sh dev/test/test.sh calls $(B) "$(CC)" calls

## test-pairs: every flag with the test of each of its sides, and flags that meet; SEED=1 for others
test-pairs: $(PAIRED)
	$(B)/pairs --build $(B) --seed $(or $(SEED),0)

## soak: kills a run 500 times, at every point of a step and of a save; it must resume to the same bits
soak: $(B)/soak $(B)/train-FP32
	$(B)/soak --train $(B)/train-FP32 --kills 500

## sanitize: make test-cpu under the address and undefined-behavior sanitizers with small pieces, and make races
# With sanitizers gcc's warnings are not reliable.
sanitize:
	@$(MAKE) --no-print-directory B=build/sanitize WARNINGS= PROGRAMS_CHECKS= PROCESSES_CHECKS= SOAK= \
	    OPTIMIZE="-Og -g1 -march=native $(ADDRESSES) $(SMALL_PIECES)" test-cpu
	@$(MAKE) --no-print-directory races

## races: the loader, offloading, the saver and the transport under ThreadSanitizer
# Without OpenMP, whose barriers it does not know.
races:
	@TSAN_OPTIONS=exitcode=66 $(MAKE) --no-print-directory B=build/races WARNINGS= OPENMP=-Wno-unknown-pragmas \
	    OPTIMIZE="-Og -g1 -march=native -fsanitize=thread -Wno-tsan" test-races
# test_comm mostly waits; the others compute meanwhile.
test-races: $(filter-out $(SKIP),test-races-comm) test-races-runs
test-races-comm: $(B)/test_comm
	@sh dev/test/test.sh races-comm $(B) "$(CC)" test_comm
test-races-runs: $(addprefix $(B)/,test_data test_offload train-FP32 tokenize)
	@sh dev/test/test.sh races $(B) "$(CC)" test_data test_offload races

## test-posix: the code that macOS runs, on Linux, without the calls that only Linux has; POSIX_TESTS=names
# llmtrain/base/system.h has the code that other systems run instead of those calls.
POSIX_TESTS ?= test_files test_offload test_data test_comm test_supervise test_errors test_ranks \
    test_train-FP32 test_model-FP32 test_runs-FP32
test-posix:
	@$(MAKE) --no-print-directory B=build/posix MPI=off WARNINGS= OPTIMIZE="-Og $(TUNE) -DLLMTRAIN_POSIX_ONLY" \
	    test-posix-suites
test-posix-suites: $(addprefix $(B)/,$(POSIX_TESTS) supervise train-FP32 $(if $(filter test_ranks,$(POSIX_TESTS)), \
    train-BF16) generate-FP32 corpus tokenize)
	@sh dev/test/test.sh posix $(B) "$(CC)" posix $(POSIX_TESTS)

## mutants: checks the tests: they must find planted bugs, a list (ONLY=text SAMPLE=10) or MUTANTS=300 SEED=7 random
mutants: | $(B)
	@python3 dev/test/mutants.py $(B) $(if $(MUTANTS),$(MUTANTS) $(or $(SEED),1),list "$(ONLY)" "$(SAMPLE)")
## coverage: the lines and branches of the product that no suite runs, by file, to build/coverage.txt
coverage: | $(B)
	@python3 dev/test/mutants.py $(B) coverage

## fuzz: fuzzes the readers of files, FUZZ_SECONDS=600 each (needs clang)
FUZZ_SECONDS ?= 600
fuzz: | $(B)
	CC="$(CC)" sh dev/test/fuzz.sh $(B) $(FUZZ_SECONDS) $(UNPACK)

## peers-tokenizers: directories as transformers writes them: the ids of AutoTokenizer (pip install transformers numpy)
peers-tokenizers: $(B)/tokenizer_ids
	python3 dev/peers/tokenizer_ids.py --program $(B)/tokenizer_ids --directories $(B)/tokenizer_directories

# ---------------------------------------------------------------------------------------------------------------------
# 6. Measurements

##@ Measurements
## bench: where the time of a training step goes; RECOMPUTE=block: time and memory of the levels up to that one
ifneq ($(FOR_GPU),)  # ten seconds of steps on a large GPU, whose clocks need that time to settle
bench: $(B)/bench-cuda-BF16
	$(B)/bench-cuda-BF16 --batch 64 --seq 1024 --steps 80 \
	    $(if $(RECOMPUTE),--recompute $(RECOMPUTE),--kernels $(B)/kernels.txt)
else ifdef RECOMPUTE
bench: $(B)/bench-FP32 $(B)/bench-BF16
	$(B)/bench-FP32 --batch 4 --seq 256 --recompute $(RECOMPUTE)
	$(B)/bench-BF16 --batch 4 --seq 256 --recompute $(RECOMPUTE)
else
bench: $(B)/bench-FP32 $(B)/bench-BF16 $(B)/gemm
	$(B)/bench-FP32 --batch 4 --seq 64
	$(B)/bench-BF16 --batch 4 --seq 64
	$(B)/bench-FP32 --batch 4 --seq 256
	$(B)/bench-BF16 --batch 4 --seq 256
	$(B)/bench-FP32 --sweep
endif

## tour: one step of a tiny model, operation by operation: shapes, results, cost; FAMILY=llama
FAMILY ?= gpt2
tour: $(B)/bench-FP32
	@$(B)/bench-FP32 --tour --model $(FAMILY):tiny --batch 4 --seq 32 --threads 1

## plan-published: published training runs, next to what build/plan predicts: doc/published.md, doc/published.svg
plan-published: $(B)/published
	$(B)/published --table doc/published.md --plot doc/published.svg

## bench-axes: what layouts of ranks send, take and idle, beside their plans
bench-axes: $(addprefix $(B)/,train-FP32 corpus tokenize)
	python3 dev/bench/axes.py --build $(B)

## bench-checkpoint: the cost of saving and loading GPT-2 124M, compared with dd on the same disk
bench-checkpoint: $(B)/checkpoint_cost
	$(B)/checkpoint_cost --dir $(B)

##@ CUDA without a GPU
## emulated: the CUDA build of the trainer, run on the CPU: build/train-emulated-FP32 and so on
emulated: $(PRECISIONS:%=$(B)/train-emulated-%)

## sectors: sectors and bank conflicts of the shipped kernels, counted by the emulator, against the ideal
sectors: $(COUNTED)
	@for type in BF16 FP32; do \
	    echo "$$type:"; sh dev/gpu/sectors.sh $(B) $$type > $(B)/sectors-$$type.txt; status=$$?; \
	    cat $(B)/sectors-$$type.txt; [ $$status -eq 0 ] || exit 1; done

## bounds: minimum times of kernels, from machine code (needs nvcc); GPU=H100 MODEL=gpt2:124M BATCH=64
# MEASURED=FILE: a file of `bench --kernels` on a GPU. With sectors and bank conflicts, if make sectors counted them.
GPU ?= H100
BOUNDS := $(if $(MODEL),$(MODEL)=$(or $(BATCH),64),gpt2:124M=64 gpt2:1558M=32)
bounds: $(B)/resources-BF16.txt
	@for step in $(BOUNDS); do \
	    python3 dev/gpu/bounds.py --launches $(B)/launches-BF16 --code $(B)/machine-code-BF16.jsonl --gpu $(GPU) \
	        --model $${step%=*} --batch $${step#*=} $(if $(MEASURED),--measured "$(MEASURED)") \
	        $(patsubst %,--sectors %,$(wildcard $(B)/sectors-BF16.jsonl)) || exit 1; done
