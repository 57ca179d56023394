//! The processor that the guest's kernel sees: the host's, less what a process has no part in.
//!
//! Programs see the host's own CPUID, because it does not trap in a process. So the kernel must see
//! at least the registers that programs may use, or it would not save them.

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// x87, SSE, AVX, AVX-512. Not: protection keys, tiles, which a process has to ask for.
const STATES: u64 = 0xE7;
const CR4_XSAVE: u64 = crate::vcpu::CR4_XSAVE;

const fn bits(list: &[u32]) -> u32 {
    let mut all = 0;
    let mut at = 0;
    while at < list.len() {
        all |= 1 << list[at];
        at += 1;
    }
    all
}

// MONITOR, DTES64, DS-CPL, VMX, SMX, EST, TM2, PDCM, PCID, DCA, X2APIC, TSC deadline, OSXSAVE
const BASIC_ECX: u32 = bits(&[2, 3, 4, 5, 6, 7, 8, 15, 17, 18, 21, 24, 27]);
// VME, DE, MCE, APIC, SEP, MTRR, MCA, DS, ACPI, HTT, TM, PBE
const BASIC_EDX: u32 = bits(&[1, 2, 7, 9, 11, 12, 14, 21, 22, 28, 29, 31]);
const HYPERVISOR: u32 = 1 << 31;
// its number is 0; cache lines have 64 bytes
const ONE_PROCESSOR: u32 = 1 << 16 | 8 << 8;
// SGX, HLE, SMEP, INVPCID, RTM, resource monitoring, MPX, resource allocation, SMAP, processor trace
const EXTENDED_EBX: u32 = bits(&[2, 4, 7, 10, 11, 12, 14, 15, 20, 25]);
// UMIP, PKU, OSPKE, WAITPKG, shadow stacks, TME, LA57, RDPID, key locker, bus lock, CLDEMOTE, ENQCMD, SGX,
// PKS
const EXTENDED_ECX: u32 = bits(&[2, 3, 4, 5, 7, 13, 16, 22, 23, 24, 25, 29, 30, 31]);
// short REP MOV and the like are kept; the rest controls what only the host's kernel may
const EXTENDED_EDX_KEPT: u32 = bits(&[4, 8]);
// SVM, extended APIC, OSVW, IBS, SKINIT, WDT, LWP, topology, performance counters, breakpoints, MWAITX
const AMD_ECX: u32 = bits(&[2, 3, 9, 10, 12, 13, 15, 22, 23, 24, 26, 27, 28, 29, 30]);
// those of leaf 1, in their places
const AMD_EDX: u32 = bits(&[1, 2, 7, 9, 12, 14]);

/// AMD's second leaf of extended features, the last one here.
const EXTENDED_AMD_2: u32 = 0x8000_0021;
/// A load of a null selector clears the segment's base, as the monitor's emulation does. Otherwise the kernel
/// would load another selector first, by code that cannot be replaced.
const NULL_CLEARS_BASE: u32 = 1 << 6;

/// Changes a leaf for a machine whose programs run in processes of their own. The kernel is to copy
/// to and from programs by the function that the monitor replaces ([`crate::thunks::USES`]). The
/// function for fast short strings does not qualify, because the kernel would change its beginning.
pub fn separate_programs(leaf: u32, registers: &mut [u32; 4]) {
    const FAST_STRINGS: u32 = 1 << 9;
    const FAST_SHORT_STRINGS: u32 = 1 << 4;
    keep_translations(leaf, registers);
    if leaf == 7 {
        registers[1] &= !FAST_STRINGS;
        registers[3] &= !FAST_SHORT_STRINGS;
    }
}

/// Changes a leaf for a machine that keeps the mappings of several address spaces. It shows
/// process-context identifiers, whatever the host's processor has.
pub fn keep_translations(leaf: u32, registers: &mut [u32; 4]) {
    const CONTEXT_IDENTIFIERS: u32 = 1 << 17;
    if leaf == 1 {
        registers[2] |= CONTEXT_IDENTIFIERS;
    }
}

/// Changes a leaf for one of several processors. It has a number, a local interrupt controller, and
/// a timer that goes on while the processor sleeps. All are of one package, so that a kernel knows
/// the others' speed by the first one's. Manufacturers differ in how they say that.
pub fn be_one_of(number: usize, count: usize, leaf: u32, registers: &mut [u32; 4]) {
    const CONTROLLER: u32 = 1 << 9;
    const DEADLINE: u32 = 1 << 24;
    const SEVERAL: u32 = 1 << 28;
    const ALWAYS: u32 = 1 << 2;
    let is_amd = is_amd();
    match leaf {
        1 => {
            registers[1] |= (number as u32) << 24;
            registers[2] |= DEADLINE;
            registers[3] |= CONTROLLER;
            if !is_amd {
                registers[1] = registers[1] & !0xFF_0000 | (count as u32) << 16;
                registers[3] |= SEVERAL;
            }
        }
        4 if !is_amd && registers[0] & 0x1F != 0 => registers[0] |= (count as u32 - 1) << 26,
        6 => registers[0] |= ALWAYS,
        0x8000_0008 if is_amd => registers[2] = count as u32 - 1,
        _ => {}
    }
}

/// Returns true if the host's processor is AMD's or Hygon's.
fn is_amd() -> bool {
    // The last letters of AuthenticAMD and HygonGenuine.
    [*b"cAMD", *b"uine"].contains(&__cpuid(0).ecx.to_le_bytes())
}

/// States of registers that both the host's kernel and this monitor keep.
#[must_use]
pub fn extended_states() -> u64 {
    // SAFETY: The start requires XSAVE.
    unsafe { _xgetbv(0) & STATES }
}

/// Returns true if the host's processor and kernel have XSAVE.
#[must_use]
pub fn has_xsave() -> bool {
    __cpuid(1).ecx >> 27 & 1 == 1
}

/// Returns the size of the floating-point registers' area, in bytes.
#[must_use]
pub fn extended_size() -> u32 {
    __cpuid_count(0xD, 0).ecx
}

/// Returns the size of the area for the states that the guest's kernel keeps, in bytes.
#[must_use]
pub fn size_of(states: u64) -> u32 {
    const LEGACY: u32 = 576;
    let ends = (2..32).filter(|state| (extended_states() & states) >> state & 1 == 1).map(|state| {
        let leaf = __cpuid_count(0xD, state);
        leaf.eax + leaf.ebx
    });
    ends.max().unwrap_or(LEGACY).max(LEGACY)
}

/// Returns the guest's EAX, EBX, ECX and EDX.
#[must_use]
pub fn guest(leaf: u32, subleaf: u32, cr4: u64) -> [u32; 4] {
    let host = __cpuid_count(leaf, subleaf);
    let [a, b, c, d] = [host.eax, host.ebx, host.ecx, host.edx];
    match leaf {
        0 => [a.min(0x14), b, c, d],
        1 => {
            let xsave = if cr4 & CR4_XSAVE != 0 { 1 << 27 } else { 0 };
            [a, ONE_PROCESSOR, c & !BASIC_ECX | xsave | HYPERVISOR, d & !BASIC_EDX]
        }
        2 => [a, b, c, d],
        4 if a & 0x1F != 0 => [a & 0x3FFF, b, c, d],
        7 if subleaf == 0 => [0, b & !EXTENDED_EBX, c & !EXTENDED_ECX, d & EXTENDED_EDX_KEPT],
        0xD if subleaf == 0 => [a & STATES as u32, size_of(STATES), size_of(STATES), 0],
        0xD if subleaf == 1 => [a & 1, 0, 0, 0],
        0xD if subleaf < 32 && STATES >> subleaf & 1 == 1 => [a, b, c, d],
        0x8000_0000 if is_amd() => [EXTENDED_AMD_2, b, c, d],
        0x8000_0000 => [a.min(0x8000_0008), b, c, d],
        0x8000_0001 => [a, b, c & !AMD_ECX, d & !AMD_EDX],
        0x8000_0002..=0x8000_0006 => [a, b, c, d],
        0x8000_0007 => [0, 0, 0, d & 1 << 8],
        0x8000_0008 => [a & 0xFFFF, b & 1, 0, 0],
        EXTENDED_AMD_2 if is_amd() => [NULL_CLEARS_BASE, 0, 0, 0],
        _ => [0; 4],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_no_part_in_some_things() {
        let [_, _, ecx, edx] = guest(1, 0, 0);
        assert_eq!((ecx & (1 << 21 | 1 << 5 | 1 << 27), edx & 1 << 9), (0, 0));
        assert_ne!(guest(1, 0, CR4_XSAVE)[2] & 1 << 27, 0);
        assert_eq!(guest(7, 0, 0)[1] & (1 << 20 | 1 << 7), 0);
        assert_eq!(guest(0x8000_001F, 0, 0), [0; 4]);
    }

    #[test]
    fn the_kernel_sees_that_a_null_selector_clears_the_base() {
        if is_amd() {
            assert!(guest(0x8000_0000, 0, 0)[0] >= 0x8000_0021);
            assert_eq!(guest(0x8000_0021, 0, 0), [1 << 6, 0, 0, 0]);
        }
    }
}
