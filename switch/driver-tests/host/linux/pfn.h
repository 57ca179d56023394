/* SPDX-License-Identifier: GPL-2.0-only */
#define PHYS_PFN(phys) ((unsigned long)((phys) >> 12))
#define PFN_PHYS(pfn) ((u64)(pfn) << 12)
