/* SPDX-License-Identifier: GPL-2.0-only */
#include <asm/page.h>

#define PMD_SHIFT	21
#define PMD_SIZE	(1UL << PMD_SHIFT)
