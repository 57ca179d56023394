//! VMX's instructions (SDM volume 3, "VMX instruction reference") and what goes with them. Each is #UD
//! outside of what its SAFETY line names, so all of them are `unsafe` to call but for those that check
//! themselves.

use core::arch::asm;

use mercury_abi::gate::DescriptorTable;

/// The outcome of a VMX instruction ("Conventions"): RFLAGS.CF and ZF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// VMfailInvalid: there is no current VMCS.
    Invalid,
    /// VMfailValid: the VM-instruction error field says why.
    Valid,
}

/// Result of a VMX instruction.
pub type Outcome = Result<(), Failure>;

/// Executes VMXON with the region at `region_phys`. Returns `false` if it failed or faulted:
/// IA32_FEATURE_CONTROL, CR0 or CR4 do not allow it.
#[must_use]
pub fn vmxon(region_phys: u64) -> bool {
    // SAFETY: the processor checks the region's revision; its page is mapped nowhere. A #GP continues at
    // the label by the fix-up entry.
    unsafe {
        asm!(
            "2: vmxon [{region}]",
            "jna {failed}",
            ".pushsection .fixup, \"a\"",
            ".long 2b - .",
            ".long {failed} - .",
            ".popsection",
            region = in(reg) &raw const region_phys,
            failed = label { return false },
            options(nostack),
        );
    }
    true
}

/// Executes VMCLEAR, whose failure has no consequence any more, and VMXOFF.
///
/// # Safety
/// In VMX root operation only; the page holds a VMCS of this CPU.
#[inline]
pub unsafe fn vmxoff(vmcs_phys: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("vmclear [{pointer}]", "vmxoff", pointer = in(reg) &raw const vmcs_phys, options(nostack));
    }
}

macro_rules! on_pointer {
    ($(#[$doc:meta])* $name:ident, $instruction:literal) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// The processor refused.
        ///
        /// # Safety
        /// In VMX root operation only; the page holds a VMCS of this CPU.
        #[inline]
        pub unsafe fn $name(vmcs_phys: u64) -> Outcome {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    concat!($instruction, " [{pointer}]"),
                    "jc {invalid}",
                    "jz {valid}",
                    pointer = in(reg) &raw const vmcs_phys,
                    invalid = label { return Err(Failure::Invalid) },
                    valid = label { return Err(Failure::Valid) },
                    options(nostack),
                );
            }
            Ok(())
        }
    };
}

on_pointer! {
    /// VMCLEAR: the VMCS is neither current nor launched, and its memory is up to date.
    vmclear, "vmclear"
}
on_pointer! {
    /// VMPTRLD: the VMCS is current.
    vmptrld, "vmptrld"
}

/// Executes VMREAD. If the processor refuses, because there is no current VMCS, the value is undefined.
///
/// # Safety
/// In VMX root operation only.
#[inline]
#[must_use]
pub unsafe fn vmread(field: u32) -> u64 {
    let value: u64;
    // SAFETY: the caller's promise; a refusal leaves the register as it is. It may be the field's own.
    unsafe {
        asm!(
            "vmread {field:r}, {field:r}",
            field = inout(reg) u64::from(field) => value,
            options(nomem, nostack),
        );
    }
    value
}

/// Executes VMWRITE. Returns true if the processor took it, which only builds with debug assertions check.
///
/// # Safety
/// In VMX root operation only.
#[inline]
pub unsafe fn vmwrite(field: u32, value: u64) -> bool {
    if !cfg!(debug_assertions) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!("vmwrite {field}, {value}", field = in(reg) u64::from(field), value = in(reg) value,
                 options(nostack));
        }
        return true;
    }
    let taken: u8;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("vmwrite {field}, {value}", "seta {taken}", field = in(reg) u64::from(field),
             value = in(reg) value, taken = lateout(reg_byte) taken, options(nostack));
    }
    taken != 0
}

/// Executes INVEPT of all contexts: guest-physical and combined translations (SDM, "Operations that
/// invalidate cached mappings").
///
/// # Safety
/// In VMX root operation, where IA32_VMX_EPT_VPID_CAP has it.
#[inline]
pub unsafe fn invept_all() {
    const ALL_CONTEXTS: u64 = 2;
    let descriptor = [0_u64; 2];
    // SAFETY: the caller's promise.
    unsafe {
        asm!("invept {kind}, [{descriptor}]", kind = in(reg) ALL_CONTEXTS,
             descriptor = in(reg) &raw const descriptor, options(nostack));
    }
}

/// Executes INVVPID of all contexts: linear and combined translations of every identifier but 0.
///
/// # Safety
/// In VMX root operation, where IA32_VMX_EPT_VPID_CAP has it.
#[inline]
pub unsafe fn invvpid_all() {
    const ALL_CONTEXTS: u64 = 2;
    let descriptor = [0_u64; 2];
    // SAFETY: the caller's promise.
    unsafe {
        asm!("invvpid {kind}, [{descriptor}]", kind = in(reg) ALL_CONTEXTS,
             descriptor = in(reg) &raw const descriptor, options(nostack));
    }
}

/// XSETBV; `false` if the processor raised #GP. CR4.OSXSAVE, which the hypervisor has not, is set meanwhile.
#[must_use]
pub fn xsetbv(index: u32, value: u64) -> bool {
    const CR4_OSXSAVE: u64 = 1 << 18;
    let failed: u32;
    // SAFETY: the value is what the system above asked for, checked by the processor; a #GP continues at
    // label 3 by the fix-up entry, and CR4 is as it was in either case.
    unsafe {
        asm!(
            "mov {saved}, cr4",
            "mov {with}, {saved}",
            "or {with}, {osxsave}",
            "mov cr4, {with}",
            "xor {failed:e}, {failed:e}",
            "2: xsetbv",
            "jmp 4f",
            "3: mov {failed:e}, 1",
            "4: mov cr4, {saved}",
            ".pushsection .fixup, \"a\"",
            ".long 2b - .",
            ".long 3b - .",
            ".popsection",
            saved = out(reg) _,
            with = out(reg) _,
            osxsave = const CR4_OSXSAVE,
            failed = out(reg) failed,
            in("ecx") index,
            in("eax") value as u32,
            in("edx") (value >> 32) as u32,
            options(nostack),
        );
    }
    failed == 0
}

/// Executes WBINVD: writes caches back and empties them.
pub fn wbinvd() {
    // SAFETY: writes caches back and empties them; changes nothing that can be observed but time.
    unsafe { asm!("wbinvd", options(nostack, preserves_flags)) };
}

/// Executes LTR.
///
/// # Safety
/// The selector names an available task-state segment in the current GDT, which is writable.
pub unsafe fn ltr(selector: u16) {
    // SAFETY: the caller's promise.
    unsafe { asm!("ltr {:x}", in(reg) selector, options(nostack, preserves_flags)) };
}

/// Executes LLDT.
///
/// # Safety
/// The selector is null or names an LDT in the current GDT.
pub unsafe fn lldt(selector: u16) {
    // SAFETY: the caller's promise.
    unsafe { asm!("lldt {:x}", in(reg) selector, options(nostack, preserves_flags)) };
}

/// Executes LGDT.
///
/// # Safety
/// `table` describes a descriptor table that stays, with the selectors in use where they are in the present
/// one.
#[inline]
pub unsafe fn lgdt(table: &DescriptorTable) {
    // SAFETY: the caller's promise.
    unsafe { asm!("lgdt [{}]", in(reg) &raw const table.limit, options(nostack, preserves_flags)) };
}

/// Ends as the processor does after a triple fault: it shuts down, and the machine resets it.
///
/// # Safety
/// Nothing that runs here is needed any more.
pub unsafe fn shut_down() -> ! {
    let nothing = [0_u16; 5];
    // SAFETY: without an interrupt table the exception cannot be delivered, nor can the next.
    unsafe { asm!("lidt [{}]", "ud2", in(reg) &raw const nothing, options(noreturn)) };
}
