/* SPDX-License-Identifier: GPL-2.0-only */
#include <stdlib.h>

#define __inline_bsearch bsearch
