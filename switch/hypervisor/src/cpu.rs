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

/// XMM0 to XMM15. The hypervisor's code may use them. It never touches the halves above bit 127.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Xmm(pub [u128; 16]);

/// Step of a CPU between the system and the hypervisor. The emergency path chooses the way out by it.
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

/// Guest registers at the beginning of the exit, which an exit handler may change.
#[derive(Clone, Copy, Debug, Default)]
pub struct Interrupted {
    /// RIP of the instruction that exited, virtual.
    pub rip: u64,
    /// RAX at the exit.
    pub rax: u64,
    /// RDX at the exit.
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
    /// 1 while `xmm` and `mxcsr` hold the system's registers. Otherwise those are in the processor. Only
    /// [`crate::host::entry`] changes the number.
    pub sse_saved: u32,
    /// Step that this CPU is in.
    pub phase: Phase,
    /// [`mercury_abi::gate::Vendor`] as a number: the type of the area.
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
    /// Registers with which the system goes on if the present exit fails.
    pub interrupted: Interrupted,
    /// [`mercury_abi::code::Code`] of a departure that waits for an event to be delivered; 0: none waits.
    pub leave_pending: u32,
    /// 1 once the guest has run since the attach.
    pub entered: u32,
    /// [`crate::snapshot::live::ON_SNAPSHOT`] or [`crate::snapshot::live::ON_LOG`] while the guest runs on
    /// the tables of a snapshot or of a dirty log; otherwise 0.
    pub on_snapshot: u32,
    /// 1 while the CPU stays attached although the kernel switches virtualization off.
    pub is_held: u32,
    /// TSC at the start of the current exit.
    pub exit_tsc: u64,
    /// Features of this processor that the switch depends on: the vendor's bits.
    pub features: u32,
    /// 1 once the descriptor tables and the task state of this area are filled.
    pub prepared: u32,
    /// Barriers of [`crate::speculation`] that this processor needs: [`crate::speculation::IBPB`].
    pub barriers: u32,
    /// GDT of the hypervisor on this CPU.
    pub gdt: HostGdt,
    /// Task state of the hypervisor on this CPU.
    pub tss: TaskState,
}

const _: () = assert!(offset_of!(Cpu, xmm) == GATE_PRIVATE_OFFSET);
const _: () = assert!(size_of::<Cpu>() <= 2560);

/// One CPU's area, all of its pages. The driver carves and zeroes it at load.
#[repr(C, align(32768))]
#[derive(Debug)]
pub struct Area<V: Vendor> {
    /// Page 0: the gate's block and the data of every vendor.
    pub cpu: Cpu,
    /// Rest of page 0: data of the vendor.
    pub own: V::Own,
    /// Page 1: the control block.
    pub control: V::Control,
    /// Page 2: extended state of the hypervisor.
    pub host: V::Host,
    /// Page 3: stacks of exceptions.
    pub exception_stacks: [u8; 4096],
    /// Page 4: never touched by software, not mapped.
    processor: [u8; 4096],
    /// Pages 5 to 7: the stack, which grows down to page 4.
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

    /// Returns the host-physical address of the page that only the processor uses.
    #[must_use]
    pub fn processor_page_phys(&self) -> u64 {
        self.cpu.gate.area_phys + (AREA_PAGE_PROCESSOR * 4096) as u64
    }

    /// Returns the block that this CPU publishes to user space.
    pub fn shared(&mut self) -> &mut SharedCpu {
        let shared = core::ptr::with_exposed_provenance_mut::<SharedCpu>(self.cpu.gate.shared_virt as usize);
        // SAFETY: the driver maps one block per CPU at this address, read-write, for as long as the
        // hypervisor is loaded; only this CPU writes it, and `self` is borrowed for as long.
        unsafe { &mut *shared }
    }
}

/// Returns the start of the area that the current stack lies in. [`crate::vendor::visit`] finds its type.
///
/// Meaningful only on a stack of an [`Area`].
#[must_use]
pub fn area_of_stack() -> *mut Cpu {
    let rsp: usize;
    // SAFETY: reads a register.
    unsafe { core::arch::asm!("mov {}, rsp", out(reg) rsp, options(nomem, nostack, preserves_flags)) };
    core::ptr::with_exposed_provenance_mut::<Cpu>(rsp.wrapping_sub(1) & !(AREA_SIZE - 1))
}
