#pragma once
#include "race_clocks.h"
static inline void note_access(void*, unsigned, unsigned, void*) {}
static inline void begin_race(Launch*) {}
static inline void end_race(Launch*) {}
