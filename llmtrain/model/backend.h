// backend.h: the operations of the backend that this program is compiled for, and its device.
//
// The same calls compute on a CPU (kernels_cpu.h) or, with -DLLMTRAIN_CUDA, on a GPU (kernels.cuh).

#ifndef LLMTRAIN_BACKEND_H
#define LLMTRAIN_BACKEND_H

#include "../../kernels_cpu.h"
#ifdef LLMTRAIN_CUDA
#include "../../kernels.cuh"
#include "../base/device.cuh"
#include "../base/matmul_choice.cuh"
#else
#include "../base/device_cpu.h"
#endif

#endif  // LLMTRAIN_BACKEND_H
