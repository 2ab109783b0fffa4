// Switching between stacks. One fiber is one CUDA thread; a fiber never changes its OS thread, because its shared
// memory is thread-local.
//
// x86-64 has a hand-written switch (callee-saved registers only). Everything else, or -DMHC_FIBERS_UCONTEXT, uses
// ucontext, which is portable but enters the kernel on every switch.
#pragma once

#include <stdint.h>
#include <string.h>

#if !defined(__x86_64__) && !defined(MHC_FIBERS_UCONTEXT)
#define MHC_FIBERS_UCONTEXT 1
#endif

#ifdef MHC_FIBERS_UCONTEXT
#include <ucontext.h>

struct Context {
  ucontext_t saved;
};

static inline void context_prepare(Context& context, char* stack, uint64_t bytes, void (*start)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, start, 0);
}

static inline void context_switch(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

#else

struct Context {
  void* stack_pointer;
};

// Saves the callee-saved registers of the System V ABI on the old stack and takes them from the new one.
// MXCSR and the x87 control word are the same in all fibers of a launch and stay as they are.
extern "C" __attribute__((visibility("hidden"))) void mhc_switch_stack(void** save, void* load);
__asm__(
    ".text\n"
    ".p2align 4\n"
    ".globl mhc_switch_stack\n"
    ".hidden mhc_switch_stack\n"
    ".type mhc_switch_stack, @function\n"
    "mhc_switch_stack:\n"
    "  pushq %rbx\n"
    "  pushq %rbp\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbp\n"
    "  popq %rbx\n"
    "  ret\n"
    ".size mhc_switch_stack, . - mhc_switch_stack\n");

static inline void context_prepare(Context& context, char* stack, uint64_t bytes, void (*start)()) {
  constexpr int saved_registers = 6;
  // From the top down: a null return address (ends a backtrace, and gives `start` the alignment that a call
  // would), the address that the first `ret` takes, and zeros for the registers.
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15});
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(start);
  top -= saved_registers;
  memset(top, 0, saved_registers * sizeof(void*));
  context.stack_pointer = top;
}

static inline void context_switch(Context& from, Context& to) {
  mhc_switch_stack(&from.stack_pointer, to.stack_pointer);
}
#endif
