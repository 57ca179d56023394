//! Model-specific registers, read and written under a fix-up: where the processor raises #GP, the
//! hypervisor's exception handler continues at the recovery address and the access reports failure.
//!
//! The pairs (faulting address, recovery address) stand in a table of relative offsets, so that the
//! image needs no relocation for them; [`recovery_of`] finds them.

use core::arch::asm;

/// EFER (APM vol. 2, 3.1.7).
pub const EFER: u32 = 0xC000_0080;
/// EFER.SVME: SVM is on.
pub const EFER_SVME: u64 = 1 << 12;
/// EFER.LMA: read-only, long mode is active.
pub const EFER_LMA: u64 = 1 << 10;
/// EFER.LME: long mode is enabled.
pub const EFER_LME: u64 = 1 << 8;
/// PAT (APM vol. 2, 7.8).
pub const PAT: u32 = 0x277;
/// SPEC_CTRL: controls of speculation (APM vol. 2, 3.2.9).
pub const SPEC_CTRL: u32 = 0x48;
/// IA32_PRED_CMD: writing 1 is a barrier for predictions of indirect branches (APM volume 2, 3.2.10).
pub const PRED_CMD: u32 = 0x49;
/// VM_HSAVE_PA (APM vol. 2, 15.30.4).
pub const VM_HSAVE_PA: u32 = 0xC001_0117;
/// The microcode trigger of AMD.
pub const PATCH_LOADER: u32 = 0xC001_0020;
/// The microcode trigger of Intel: IA32_BIOS_UPDT_TRIG (SDM volume 4, table 2-2, as those below).
pub const MICROCODE_TRIGGER: u32 = 0x79;
/// IA32_APIC_BASE: address and mode of the local APIC.
pub const APIC_BASE: u32 = 0x1B;
/// IA32_PEBS_ENABLE: counters that record samples.
pub const PEBS_ENABLE: u32 = 0x3F1;
/// IA32_SYSENTER_CS: selector for SYSENTER.
pub const SYSENTER_CS: u32 = 0x174;
/// IA32_SYSENTER_ESP: stack of SYSENTER, virtual.
pub const SYSENTER_ESP: u32 = 0x175;
/// IA32_SYSENTER_EIP: entry of SYSENTER, virtual.
pub const SYSENTER_EIP: u32 = 0x176;
/// IA32_VMX_EPT_VPID_CAP: capabilities of nested tables.
pub const VMX_EPT_VPID_CAP: u32 = 0x48C;
/// FS base (APM vol. 2, 4.5.3).
pub const FS_BASE: u32 = 0xC000_0100;
/// GS base (APM vol. 2, 4.5.3).
pub const GS_BASE: u32 = 0xC000_0101;
/// KernelGSBase: the base that SWAPGS loads into GS.
pub const KERNEL_GS_BASE: u32 = 0xC000_0102;
/// SYSCFG (APM vol. 2, 3.2.1).
pub const SYSCFG: u32 = 0xC001_0010;
/// TOP_MEM2 (APM vol. 2, 7.9.4).
pub const TOP_MEM2: u32 = 0xC001_001D;
/// MCG_STATUS: state of a machine check (APM vol. 2, 9.3.1.2).
pub const MCG_STATUS: u32 = 0x17A;
/// DEBUGCTL: branch records and single steps of branches.
pub const DEBUGCTL: u32 = 0x1D9;
/// S_CET: control-flow enforcement of the kernel.
pub const S_CET: u32 = 0x6A2;
/// U_CET; bit 0: user mode has shadow stacks.
pub const U_CET: u32 = 0x6A0;
/// PL3_SSP: shadow-stack pointer that user mode gets, virtual.
pub const PL3_SSP: u32 = 0x6A7;
/// ISST_ADDR: interrupt shadow-stack table, virtual.
pub const ISST_ADDR: u32 = 0x6A8;
/// MTRRcap: number and kinds of ranges.
pub const MTRR_CAP: u32 = 0xFE;
/// MTRRdefType: default type, and enable bits.
pub const MTRR_DEF_TYPE: u32 = 0x2FF;
/// MTRRphysBase0; base and mask of register n are at 2n and 2n + 1 from here.
pub const MTRR_PHYS_BASE0: u32 = 0x200;
/// The eleven fixed-range MTRRs in ascending order of their addresses.
pub const MTRR_FIXED: [u32; 11] =
    [0x250, 0x258, 0x259, 0x268, 0x269, 0x26A, 0x26B, 0x26C, 0x26D, 0x26E, 0x26F];

/// Reads an MSR; `None` if the processor raised #GP.
#[inline]
#[must_use]
pub fn read(index: u32) -> Option<u64> {
    let [value] = read_all([index])?;
    Some(value)
}

/// Reads MSRs; `None` if the processor raised #GP at one of them.
#[inline]
#[must_use]
pub fn read_all<const N: usize>(indices: [u32; N]) -> Option<[u64; N]> {
    let mut failed = 0;
    let values = indices.map(|index| read_noting(index, &mut failed));
    (failed == 0).then_some(values)
}

/// Reads an MSR. Returns 0 and sets `failed` if the processor raised #GP; the caller asks once for all.
#[inline(always)]
fn read_noting(index: u32, failed: &mut u32) -> u64 {
    let value: u64;
    // SAFETY: RDMSR changes nothing but its outputs, whose upper halves it clears; a #GP continues at label 3
    // by the fix-up entry.
    unsafe {
        asm!(
            "2: rdmsr",
            "4: shl rdx, 32",
            "or rax, rdx",
            ".pushsection .text.recovery, \"ax\"",
            "3: mov {failed:e}, 1",
            "xor eax, eax",
            "xor edx, edx",
            "jmp 4b",
            ".popsection",
            ".pushsection .fixup, \"a\"",
            ".long 2b - .",
            ".long 3b - .",
            ".popsection",
            failed = inout(reg) *failed,
            in("ecx") index,
            out("rax") value,
            out("rdx") _,
            options(nostack),
        );
    }
    value
}

/// Writes an MSR; `false` if the processor raised #GP.
#[inline]
#[must_use]
pub fn write(index: u32, value: u64) -> bool {
    // SAFETY: callers write what the system above asked for, or what belongs to the switch; a #GP
    // continues at the label by the fix-up entry.
    unsafe {
        asm!(
            "2: wrmsr",
            ".pushsection .fixup, \"a\"",
            ".long 2b - .",
            ".long {failed} - .",
            ".popsection",
            failed = label { return false },
            in("ecx") index,
            in("eax") value as u32,
            in("edx") (value >> 32) as u32,
            options(nostack),
        );
    }
    true
}

/// One entry of the fix-up table: offsets of the two addresses from their own fields.
#[cfg(feature = "image")]
#[repr(C)]
struct Fixup {
    fault: i32,
    recovery: i32,
}

/// Returns the address at which execution continues after a fault at `rip`, if that instruction may fault.
#[cfg(feature = "image")]
#[must_use]
pub fn recovery_of(rip: u64) -> Option<u64> {
    unsafe extern "C" {
        static __fixup_start: Fixup;
        static __fixup_end: Fixup;
    }
    // SAFETY: link.ld puts both symbols around the table, which is read-only.
    let table = unsafe {
        let start = &raw const __fixup_start;
        let count = (&raw const __fixup_end).offset_from(start) as usize;
        core::slice::from_raw_parts(start, count)
    };
    let target = |field: &i32| (core::ptr::from_ref(field) as u64).wrapping_add_signed(i64::from(*field));
    table.iter().find(|entry| target(&entry.fault) == rip).map(|entry| target(&entry.recovery))
}
