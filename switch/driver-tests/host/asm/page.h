/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef MERCURY_HOST_PAGE_H
#define MERCURY_HOST_PAGE_H

#define PAGE_SHIFT	12
#define PAGE_SIZE	4096UL

#endif
