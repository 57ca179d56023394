// SPDX-License-Identifier: GPL-2.0-only
/*
 * A mapping of any physical page for user mode. With it a program makes the nested tables fault, and so the
 * hypervisor run, with no system call in between.
 */
#include <linux/mm.h>

#include "mercury_test.h"

/* mmap: the offset is the physical address */
int test_mmap(struct file *file, struct vm_area_struct *vma)
{
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	return remap_pfn_range(vma, vma->vm_start, vma->vm_pgoff, vma->vm_end - vma->vm_start,
			       vma->vm_page_prot);
}
