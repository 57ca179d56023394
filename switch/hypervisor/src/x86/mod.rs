//! Instructions and registers of the processor, each in the smallest wrapper that it can have.
//!
//! [`Hardware`] is what the exit handlers need of the processor; tests put a model in its place.

mod apic;
pub mod msr;
mod port;
pub mod vmx;

use core::arch::asm;

use crate::pci::Register;

/// RFLAGS.TF, the trap flag: a single step.
pub const RFLAGS_TF: u64 = 1 << 8;
/// RFLAGS.RF, the resume flag: no breakpoint at this instruction.
pub const RFLAGS_RF: u64 = 1 << 16;
/// RFLAGS.IF, the interrupt flag.
pub const RFLAGS_IF: u64 = 1 << 9;
/// DR6.BS: a single step caused the debug exception (APM vol. 2, 13.1.1.3).
pub const DR6_BS: u64 = 1 << 14;
/// DR7 with every breakpoint off (bit 10 reads as one).
pub const DR7_CLEAR: u64 = 0x400;
/// CR4.PGE, global pages.
pub const CR4_PGE: u64 = 1 << 7;
/// CR0 in the hypervisor: PE, MP, ET, NE, WP, PG and nothing that the system above has set.
pub const HOST_CR0: u64 = 0x8001_0033;

/// Copies a page by words: what processors do as fast as anything, and emulators eight times as fast as
/// bytes.
///
/// # Safety
/// Both are pages that may be read and written, and they do not overlap.
pub unsafe fn copy_page(from: *const [u64; 512], to: *mut [u64; 512]) {
    // SAFETY: by the caller's promise; the direction flag is clear.
    unsafe {
        asm!(
            "rep movsq",
            inout("rcx") 512 => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// The processor as the exit handlers see it.
pub trait Hardware {
    /// Reads an MSR; `None` if the processor raised #GP.
    fn read_msr(&mut self, index: u32) -> Option<u64>;
    /// Reads MSRs; `None` if the processor raised #GP at one of them.
    fn read_msrs<const N: usize>(&mut self, indices: [u32; N]) -> Option<[u64; N]>;
    /// Writes an MSR; `false` if the processor raised #GP.
    #[must_use]
    fn write_msr(&mut self, index: u32, value: u64) -> bool;
    /// Reads the time-stamp counter.
    fn tsc(&mut self) -> u64;
    /// Reads CR2: the address of the last page fault.
    fn cr2(&mut self) -> u64;
    /// Returns the host-physical address of the page tables in use, which are the hypervisor's own.
    fn own_tables(&mut self) -> u64;
    /// Goes on with these tables of its own, which map all that is in use at the same addresses.
    fn load_own_tables(&mut self, root_phys: u64);
    /// Forgets predictions that others have trained: see [`crate::speculation`].
    fn forget_predictions(&mut self, barriers: u32);
    /// Reads DR6: breakpoint status.
    fn dr6(&mut self) -> u64;
    /// Reads DR7: breakpoint control.
    fn dr7(&mut self) -> u64;

    /// Executes CPUID: EAX, EBX, ECX, EDX.
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// Executes XSETBV; `false` if the processor raised #GP.
    #[must_use]
    fn xsetbv(&mut self, index: u32, value: u64) -> bool;
    /// Writes caches back and empties them.
    fn write_back_caches(&mut self);

    /// Executes VMXON; `false` if it failed.
    #[must_use]
    fn vmxon(&mut self, region_phys: u64) -> bool;
    /// Makes a VMCS of this CPU clear and current.
    ///
    /// # Errors
    /// The processor refused; the number of the VM-instruction error.
    fn vmcs_load(&mut self, vmcs_phys: u64) -> Result<(), u64>;
    /// Clears the VMCS and leaves VMX operation.
    fn vmxoff(&mut self, vmcs_phys: u64);
    /// Reads a field of the current VMCS.
    fn vmread(&mut self, field: u32) -> u64;
    /// Writes a field of the current VMCS.
    fn vmwrite(&mut self, field: u32, value: u64);
    /// Forgets every translation of guests.
    fn flush_guests(&mut self, vpid: bool);
    /// Ends this CPU as a triple fault does.
    fn shut_down(&mut self) -> crate::host::entry::Next;

    /// Takes a pending NMI from the processor: opens GIF for a moment, with interrupts off.
    fn take_nmi(&mut self);
    /// Forgets every translation of every address-space identifier (AMD): enters the guest of this block,
    /// whose intercepts let nothing of it run.
    fn flush_by_entry(&mut self, control: &mut crate::svm::vmcb::Vmcb, control_phys: u64);
    /// Forgets what a virtual page was mapped to.
    fn forget_page(&mut self, virt: u64);

    /// Sends an NMI to the CPU whose local APIC has this identifier. Its page is mapped.
    fn send_nmi(&mut self, apic_id: u32);
    /// Reads a register of a PCI function.
    fn read_pci(&mut self, register: Register) -> u32;
    /// Writes a register of a PCI function.
    fn write_pci(&mut self, register: Register, value: u32);
}

/// The value of a control or debug register.
macro_rules! read_register {
    ($register:literal) => {{
        let value: u64;
        // SAFETY: reading this register at CPL 0 has no side effect.
        unsafe {
            asm!(concat!("mov {}, ", $register), out(reg) value, options(nomem, nostack, preserves_flags));
        }
        value
    }};
}

/// The processor that this code runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Processor;

impl Hardware for Processor {
    #[inline]
    fn read_msr(&mut self, index: u32) -> Option<u64> {
        msr::read(index)
    }

    #[inline]
    fn read_msrs<const N: usize>(&mut self, indices: [u32; N]) -> Option<[u64; N]> {
        msr::read_all(indices)
    }

    #[inline]
    fn write_msr(&mut self, index: u32, value: u64) -> bool {
        msr::write(index, value)
    }

    #[inline]
    fn tsc(&mut self) -> u64 {
        // SAFETY: RDTSC has no side effect; CR4.TSD does not bind CPL 0.
        unsafe { core::arch::x86_64::_rdtsc() }
    }

    #[inline]
    fn cr2(&mut self) -> u64 {
        read_register!("cr2")
    }

    #[inline]
    fn own_tables(&mut self) -> u64 {
        read_register!("cr3")
    }

    #[inline]
    fn load_own_tables(&mut self, root_phys: u64) {
        // SAFETY: by the contract; without PCIDs every translation is forgotten.
        unsafe { asm!("mov cr3, {}", in(reg) root_phys, options(nostack, preserves_flags)) };
    }

    /// As the world switch does, for who has come another way.
    #[inline(never)]
    fn forget_predictions(&mut self, barriers: u32) {
        if barriers & crate::speculation::IBPB != 0 {
            let _ = msr::write(msr::PRED_CMD, 1);
        }
        // SAFETY: calls to the next instruction, whose return addresses are taken off again; LFENCE holds
        // back what was begun before.
        unsafe {
            asm!(
                ".rept {entries}",
                "call 2f",
                "int3",
                "2:",
                ".endr",
                "add rsp, 8 * {entries}",
                "lfence",
                entries = const crate::speculation::RETURN_ENTRIES,
            );
        }
    }

    #[inline]
    fn dr6(&mut self) -> u64 {
        read_register!("dr6")
    }

    #[inline]
    fn dr7(&mut self) -> u64 {
        read_register!("dr7")
    }

    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let result = core::arch::x86_64::__cpuid_count(leaf, subleaf);
        [result.eax, result.ebx, result.ecx, result.edx]
    }

    fn xsetbv(&mut self, index: u32, value: u64) -> bool {
        vmx::xsetbv(index, value)
    }

    fn write_back_caches(&mut self) {
        vmx::wbinvd();
    }

    fn vmxon(&mut self, region_phys: u64) -> bool {
        vmx::vmxon(region_phys)
    }

    fn vmcs_load(&mut self, vmcs_phys: u64) -> Result<(), u64> {
        // SAFETY: only [`crate::vmx`] calls this, after VMXON, with the address of this CPU's control block.
        let loaded = unsafe { vmx::vmclear(vmcs_phys).and_then(|()| vmx::vmptrld(vmcs_phys)) };
        loaded.map_err(|failure| match failure {
            vmx::Failure::Invalid => 0,
            vmx::Failure::Valid => self.vmread(crate::vmx::vmcs::VM_INSTRUCTION_ERROR),
        })
    }

    #[inline]
    fn vmxoff(&mut self, vmcs_phys: u64) {
        // SAFETY: only [`crate::vmx`] calls this, in root operation; clearing first leaves nothing of the
        // VMCS in the processor (SDM, "Initializing a VMCS"; HARDWARE I-2).
        unsafe { vmx::vmxoff(vmcs_phys) };
    }

    #[inline]
    fn vmread(&mut self, field: u32) -> u64 {
        // SAFETY: only [`crate::vmx`] calls this, in root operation.
        unsafe { vmx::vmread(field) }
    }

    #[inline]
    fn vmwrite(&mut self, field: u32, value: u64) {
        // SAFETY: only [`crate::vmx`] calls this, in root operation.
        let taken = unsafe { vmx::vmwrite(field, value) };
        debug_assert!(taken);
    }

    #[inline]
    fn flush_guests(&mut self, vpid: bool) {
        // SAFETY: only [`crate::vmx`] calls this, in root operation; preflight has seen both instructions.
        unsafe {
            vmx::invept_all();
            if vpid {
                vmx::invvpid_all();
            }
        }
    }

    fn shut_down(&mut self) -> crate::host::entry::Next {
        let has_gif = msr::read(msr::EFER).is_some_and(|efer| efer & msr::EFER_SVME != 0);
        // SAFETY: the system above is gone, and nothing of this CPU is needed any more. Where the board
        // answers a shutdown by INIT, the processor takes that with GIF = 1 only (APM vol. 2, 15.17).
        unsafe {
            if has_gif {
                asm!("stgi", options(nostack));
            }
            vmx::shut_down()
        }
    }

    fn take_nmi(&mut self) {
        // SAFETY: EFER.SVME is set, and the hypervisor's IDT is loaded: the handler of vector 2 comes back
        // here.
        unsafe { asm!("stgi", "nop", "nop", "clgi", options(nostack)) };
    }

    #[inline]
    fn flush_by_entry(&mut self, control: &mut crate::svm::vmcb::Vmcb, control_phys: u64) {
        // SAFETY: by the contract no instruction of the guest is executed, so that all registers but RAX
        // are as they were; #VMEXIT brings the hypervisor's own state back. The compiler learns which
        // memory it is.
        unsafe { asm!("vmrun rax", inout("rax") control_phys => _, in("rcx") &raw mut *control) };
    }

    #[inline]
    fn forget_page(&mut self, virt: u64) {
        // SAFETY: forgetting a translation changes nothing but time.
        unsafe { asm!("invlpg [{}]", in(reg) virt, options(nostack, preserves_flags)) };
    }

    fn send_nmi(&mut self, apic_id: u32) {
        apic::send_nmi(apic_id);
    }

    fn read_pci(&mut self, register: Register) -> u32 {
        port::read_pci(register.address())
    }

    fn write_pci(&mut self, register: Register, value: u32) {
        port::write_pci(register.address(), value);
    }
}
