//! The vendor boundary: all that the rest of the hypervisor asks of [`crate::svm`] and [`crate::vmx`].
//!
//! One image holds every vendor. The driver decided for one when it took that vendor's entry point for
//! [`mercury_abi::gate::GateBlock::entry_virt`]. From there on everything is compiled for that vendor's
//! types, and no path of a switch asks again. Only code with nothing but a stack in hand, an exception or a
//! panic, finds the vendor by [`visit`].
//!
//! The vendors' folders mirror each other, file by file: the control block (`vmcb`, `vmcs`), `capture`,
//! `run`, `quick`, `exits`, `faults`, `msr`, `refusal`, `rollback`, `tests`. Only Intel's has `reset`: INIT
//! is an exit there, and on AMD ends the attachment.

use mercury_abi::code::Code;
use mercury_abi::facts::CpuFacts;
use mercury_abi::gate::{BootInfo, Vendor as Kind};
use mercury_abi::restart::SavedCpu;
use mercury_abi::shared::Registers;

use crate::address::GuestPhys;
use crate::address::HostPhys;
use crate::cpu::{Area, Cpu, Interrupted};
use crate::host::entry::Next;
use crate::nested::Tables;
use crate::paging::format::Format;
use crate::paging::plan::LargestPage;
use crate::paging::table::Depth;
use crate::snapshot::rollback::Watch;
use crate::svm::Svm;
use crate::vmx::Vmx;
use crate::x86::Hardware;

/// The hardware virtualization of one vendor.
pub trait Vendor: Sized + 'static {
    /// Number of the vendor in the driver's interface.
    const KIND: Kind;
    /// True if nested tables replace the types of the MTRRs, so that they must repeat them.
    const TYPES_FROM_MTRRS: bool;
    /// Data of a CPU in page 0 of the area. Made of integers only; all zeros is the start.
    type Own: core::fmt::Debug;
    /// The control block, a page.
    type Control: core::fmt::Debug;
    /// Extended state of the hypervisor, a page.
    type Host: core::fmt::Debug;
    /// Format of the nested tables.
    type Format: Format<Address = GuestPhys>;

    /// Returns the nested tables of this machine, if it is this vendor's.
    fn tables() -> &'static Tables<Self::Format>;

    /// Returns the width of physical addresses in bits, less the bits that memory encryption takes.
    fn physical_bits(hardware: &mut impl Hardware) -> u32;

    /// Returns the largest page that nested tables can have.
    fn largest_page(hardware: &mut impl Hardware) -> LargestPage;

    /// Returns the number of levels of the nested tables.
    fn depth(boot: &BootInfo, hardware: &mut impl Hardware) -> Depth;

    /// Returns the end of the memory above 4 GiB that is write-back by default; `None` where there is no such
    /// register.
    fn top_of_memory_2(hardware: &mut impl Hardware) -> Option<u64>;

    /// Fills the vendor's part of the area, once after a load. `task_state` is the hypervisor's own.
    fn prepare(area: &mut Area<Self>, task_state: TaskStateSegment);

    /// Returns the vendor's bits in [`Cpu::features`]. The facts have passed the preflight.
    fn features(facts: &CpuFacts) -> u32;

    /// Takes over all other facts that an attach needs.
    fn learn(area: &mut Area<Self>, facts: &CpuFacts);

    /// Puts the system's extended state aside and loads the hypervisor's.
    fn save_extended_state(area: &mut Area<Self>);

    /// Gives the system its extended state back. From here to the gate nothing may fault.
    fn restore_extended_state(area: &mut Area<Self>);

    /// Fills the control block from the live processor, which is native until [`Vendor::run`].
    ///
    /// # Errors
    /// A check that the processor would make fails, or an MSR cannot be read or written.
    fn attach(area: &mut Area<Self>, hardware: &mut impl Hardware) -> Result<(), Code>;

    /// Damages the control block so that the processor refuses it, one check at a time.
    #[cfg(feature = "fault-injection")]
    fn corrupt(area: &mut Area<Self>);

    /// Enters the guest; the argument is the area, in RDI. Does not return.
    #[cfg(feature = "image")]
    fn run() -> extern "C" fn() -> !;

    /// Prepares the way out of a native operation that did not enter the guest. All registers are as they
    /// came in, with `result` in RAX.
    fn put_back_native(area: &mut Area<Self>, hardware: &mut impl Hardware, result: Code);

    /// Has the CPU leave by itself, where the system was interrupted.
    fn depart(area: &mut Area<Self>, hardware: &mut impl Hardware, because: Code) -> Next;

    /// Ends this CPU as a triple fault does, so that the machine restarts.
    fn shut_down(area: &mut Area<Self>, hardware: &mut impl Hardware) -> Next;

    /// Returns where the system was interrupted, from the control block.
    fn interrupted(area: &mut Area<Self>) -> Interrupted;

    /// Returns the last exit, from the control block.
    fn last_exit(area: &Area<Self>) -> LastExit;

    /// Returns the event that the next entry delivers, as [`crate::event`] has it; `None` if there is no
    /// guest to deliver it to.
    fn pending_event(area: &Area<Self>, hardware: &mut impl Hardware) -> Option<u64>;

    /// Has the next entry deliver an event without an error code; 0: none.
    fn inject(area: &mut Area<Self>, hardware: &mut impl Hardware, event: u64);

    /// Asks for an exit as soon as the guest can take interrupts, after the injected event; or takes the
    /// request back.
    fn await_window(area: &mut Area<Self>, hardware: &mut impl Hardware, wanted: bool);

    /// Returns true if the processor took the entry before the present exit.
    fn was_entered(area: &Area<Self>) -> bool;

    /// Returns true if this CPU can be put back to a snapshot. On others the next three functions are never
    /// called.
    fn rolls_back(area: &Area<Self>) -> bool;

    /// Has NMIs and shutdowns of this CPU exit, or not any more.
    fn watch(area: &mut Area<Self>, hardware: &mut impl Hardware, watch: Watch);

    /// Returns true if the system is in a handler of NMIs, where no other NMI reaches it.
    fn is_in_nmi(area: &Area<Self>) -> bool;

    /// Sets the system's state to what was saved, on these nested tables and with nothing pending. NMIs and
    /// shutdowns exit.
    fn put_back(area: &mut Area<Self>, hardware: &mut impl Hardware, saved: &SavedCpu, root: HostPhys);

    /// Returns the address at which the interrupted code goes on after the handler of a machine check.
    fn resume_at(rip: u64) -> u64;
}

/// Place of a task-state segment.
#[derive(Clone, Copy, Debug)]
pub struct TaskStateSegment {
    /// Selector in the GDT.
    pub selector: u16,
    /// Limit in bytes, as in the descriptor.
    pub limit: u32,
    /// Base address, virtual.
    pub base_virt: u64,
}

/// An exit, and the system at it, for the record of a crash.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastExit {
    /// Reason of the exit, as the processor gave it.
    pub code: u64,
    /// First qualification, as the processor gave it.
    pub info1: u64,
    /// Second qualification, as the processor gave it.
    pub info2: u64,
    /// Event that was being delivered.
    pub event: u64,
    /// RFLAGS of the system.
    pub rflags: u64,
    /// CR0 of the system.
    pub cr0: u64,
    /// CR2 of the system: its last page fault.
    pub cr2: u64,
    /// CR3 of the system: root of its tables.
    pub cr3: u64,
    /// CR4 of the system.
    pub cr4: u64,
    /// Selector in CS of the system.
    pub cs: u16,
    /// Selector in SS of the system.
    pub ss: u16,
    /// General registers; RAX and RDX are those of [`Cpu::interrupted`].
    pub registers: Registers,
}

/// Work on an area whose vendor is known only at run time.
pub trait Visitor {
    /// Result of the work.
    type Output;

    /// Does the work on an area of this vendor.
    fn visit<V: Vendor>(self, area: &mut Area<V>) -> Self::Output;
}

/// Has `visitor` work on an area, with the types of its vendor.
///
/// # Safety
/// `area` is the start of an [`Area`] that [`crate::host::tables::prepare`] has prepared, and no reference
/// to it is used meanwhile.
#[expect(clippy::cast_ptr_alignment, reason = "it is the start of an area, which is aligned")]
pub unsafe fn visit<T: Visitor>(area: *mut Cpu, visitor: T) -> T::Output {
    const AMD: u32 = Kind::Amd as u32;
    // SAFETY: by the caller's promise; `prepare` wrote the number of the vendor that the area is of.
    unsafe {
        match (*area).vendor {
            AMD => visitor.visit(&mut *area.cast::<Area<Svm>>()),
            _ => visitor.visit(&mut *area.cast::<Area<Vmx>>()),
        }
    }
}
