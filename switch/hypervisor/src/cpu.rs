//! The per-CPU area: what one CPU needs while it changes sides and while it is attached.
//!
//! | page | content |
//! |------|---------|
//! | 0    | [`Cpu`]: the gate's block, then the hypervisor's own per-CPU data |
//! |      | and the vendor's ([`Vendor::Own`]) |
//! | 1    | the vendor's control block |
//! | 2    | the hypervisor's own extended state, where the processor takes it from memory |
//! | 3    | stacks for exceptions |
//! | 4    | a page that only the processor uses; not mapped: the guard beneath the stack |
//! | 5–7  | the stack |
//!
//! The area is aligned to its size, so that an exception handler finds it from its stack pointer.

use core::mem::offset_of;

use mercury_abi::gate::{
    AREA_PAGE_CONTROL, AREA_PAGE_HOST, AREA_PAGE_PROCESSOR, AREA_SIZE, DescriptorTable, GATE_PRIVATE_OFFSET,
    GateBlock,
};
use mercury_abi::shared::SharedCpu;

use crate::host::tables::{HostGdt, TaskState};
use crate::vendor::Vendor;

/// XMM0 to XMM15. The hypervisor's code may use them; the halves above bit 127 it never touches.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Xmm(pub [u128; 16]);

/// Where a CPU is on its way, for whoever has to get it out.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// The system runs, natively or as the guest.
    #[default]
    Outside,
    /// In a native operation: to leave is to return to the driver with a code.
    Native,
    /// In an exit: to leave is to go on where the system was interrupted.
    Exit,
    /// In the emergency path itself.
    Emergency,
}

/// Guest registers that an exit handler may change, as they were when the exit began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Interrupted {
    /// RIP.
    pub rip: u64,
    /// RAX.
    pub rax: u64,
    /// RDX.
    pub rdx: u64,
}

/// The start of page 0: what every vendor has. Offsets in it are the same for all.
#[repr(C)]
#[derive(Debug)]
pub struct Cpu {
    /// Shared with the driver and the gate.
    pub gate: GateBlock,
    padding: [u8; GATE_PRIVATE_OFFSET - size_of::<GateBlock>()],
    /// XMM registers of the system above while the hypervisor runs.
    pub xmm: Xmm,
    /// MXCSR of the system above.
    pub mxcsr: u32,
    /// 1 while `xmm` and `mxcsr` are the system's; otherwise its registers are in the processor. Only
    /// [`crate::host::entry`] changes it.
    pub sse_saved: u32,
    /// Where the CPU is.
    pub phase: Phase,
    /// [`mercury_abi::gate::Vendor`] as a number: of what type the area is.
    pub vendor: u32,
    /// Host-physical address of the control block.
    pub control_phys: u64,
    /// Host-physical address of the hypervisor's extended state.
    pub host_phys: u64,
    /// GDTR of the system above at the gate.
    pub guest_gdtr: DescriptorTable,
    /// IDTR of the system above at the gate.
    pub guest_idtr: DescriptorTable,
    /// The hypervisor's GDTR.
    pub host_gdtr: DescriptorTable,
    /// The hypervisor's IDTR.
    pub host_idtr: DescriptorTable,
    /// CR0 of the system above at the gate.
    pub guest_cr0: u64,
    /// What the current exit must not lose.
    pub interrupted: Interrupted,
    /// [`mercury_abi::code::Code`] of a departure that waits for an event to be delivered; 0 if none does.
    pub leave_pending: u32,
    /// 1 once the guest has run since the attach.
    pub entered: u32,
    /// [`crate::snapshot::live::ON_SNAPSHOT`] or [`crate::snapshot::live::ON_LOG`] while the guest runs on the tables of
    /// one; otherwise 0.
    pub on_snapshot: u32,
    /// 1 while it does not leave although the kernel switches virtualization off.
    pub is_held: u32,
    /// TSC at the start of the current exit.
    pub exit_tsc: u64,
    /// Features of this processor that the switch depends on: the vendor's bits.
    pub features: u32,
    /// Whether descriptor tables and task state of this area are filled.
    pub prepared: u32,
    /// What [`crate::speculation`] does besides on this processor: [`crate::speculation::IBPB`].
    pub barriers: u32,
    /// The hypervisor's GDT.
    pub gdt: HostGdt,
    /// The hypervisor's task state.
    pub tss: TaskState,
}

const _: () = assert!(offset_of!(Cpu, xmm) == GATE_PRIVATE_OFFSET);
const _: () = assert!(size_of::<Cpu>() <= 2560);

/// The whole area.
#[repr(C, align(32768))]
#[derive(Debug)]
pub struct Area<V: Vendor> {
    /// Page 0.
    pub cpu: Cpu,
    /// The rest of page 0.
    pub own: V::Own,
    /// Page 1.
    pub control: V::Control,
    /// Page 2.
    pub host: V::Host,
    /// Page 3.
    pub exception_stacks: [u8; 4096],
    /// Page 4: never touched by software, not mapped.
    processor: [u8; 4096],
    /// Pages 5 to 7.
    stack: [u8; 3 * 4096],
}

impl<V: Vendor> Area<V> {
    /// Fails to compile where a vendor's types do not fit the pages.
    pub const FITS: () = {
        assert!(size_of::<Self>() == AREA_SIZE && align_of::<Self>() == AREA_SIZE);
        assert!(offset_of!(Self, control) == AREA_PAGE_CONTROL * 4096);
        assert!(offset_of!(Self, host) == AREA_PAGE_HOST * 4096);
        assert!(offset_of!(Self, processor) == AREA_PAGE_PROCESSOR * 4096);
    };

    /// Host-physical address of the page that only the processor uses.
    #[must_use]
    pub fn processor_page_phys(&self) -> u64 {
        self.cpu.gate.area_phys + (AREA_PAGE_PROCESSOR * 4096) as u64
    }

    /// What this CPU publishes.
    pub fn shared(&mut self) -> &mut SharedCpu {
        let shared = core::ptr::with_exposed_provenance_mut::<SharedCpu>(self.cpu.gate.shared_virt as usize);
        // SAFETY: the driver maps one block per CPU at this address, read-write, for as long as the
        // hypervisor is loaded; only this CPU writes it, and `self` is borrowed for as long.
        unsafe { &mut *shared }
    }
}

/// The start of the area that the current stack lies in; [`crate::vendor::visit`] knows of what type it is.
///
/// Meaningful only on a stack of an [`Area`].
#[must_use]
pub fn area_of_stack() -> *mut Cpu {
    let rsp: usize;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mov {}, rsp", out(reg) rsp, options(nomem, nostack, preserves_flags)) };
    core::ptr::with_exposed_provenance_mut::<Cpu>(rsp.wrapping_sub(1) & !(AREA_SIZE - 1))
}
