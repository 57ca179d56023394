//! The vendor boundary: all that the rest of the hypervisor asks of [`crate::svm`] and [`crate::vmx`].
//!
//! One image holds every vendor. Which one it is was decided by the driver when it took that vendor's entry
//! point for [`mercury_abi::gate::GateBlock::entry_virt`]: from there on everything is compiled for
//! that vendor's types, and no path of a switch asks again. Only what has nothing in hand but a stack
//! (an exception, a panic) looks the vendor up, by [`visit`].
//!
//! The vendors' folders mirror each other, file by file: the control block (`vmcb`, `vmcs`), `capture`,
//! `run`, `quick`, `exits`, `msr`, `refusal`, `tests`. Only Intel's has `reset`: INIT is an exit there, and on AMD ends
//! the attachment. Only AMD's has `rollback`, so far.

use mercury_abi::code::Code;
use mercury_abi::facts::CpuFacts;
use mercury_abi::gate::{BootInfo, Vendor as Kind};
use mercury_abi::restart::SavedCpu;
use mercury_abi::shared::Registers;

use crate::address::GuestPhys;
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

/// What one vendor's hardware virtualization is.
pub trait Vendor: Sized + 'static {
    /// Which one.
    const KIND: Kind;
    /// Whether nested tables replace the types of the MTRRs, so that they must repeat them.
    const TYPES_FROM_MTRRS: bool;
    /// What it keeps of a CPU in page 0 of the area; integers only, all zeros is the start.
    type Own: core::fmt::Debug;
    /// The control block.
    type Control: core::fmt::Debug;
    /// The hypervisor's extended state.
    type Host: core::fmt::Debug;
    /// The format of its nested tables.
    type Format: Format<Address = GuestPhys>;

    /// The nested tables of this machine, if it is this vendor's.
    fn tables() -> &'static Tables<Self::Format>;

    /// Width of physical addresses in bits, less what memory encryption takes.
    fn physical_bits(hardware: &mut impl Hardware) -> u32;

    /// The largest page that nested tables can have.
    fn largest_page(hardware: &mut impl Hardware) -> LargestPage;

    /// Levels of the nested tables.
    fn depth(boot: &BootInfo, hardware: &mut impl Hardware) -> Depth;

    /// End of the memory above 4 GiB that is write-back by default; `None` where there is no such register.
    fn top_of_memory_2(hardware: &mut impl Hardware) -> Option<u64>;

    /// Fills what of the area is the vendor's, once after a load. `task_state` is the hypervisor's own.
    fn prepare(area: &mut Area<Self>, task_state: TaskStateSegment);

    /// The vendor's bits in [`Cpu::features`]. The facts have passed the preflight.
    fn features(facts: &CpuFacts) -> u32;

    /// Takes over whatever else of the facts an attach needs.
    fn learn(area: &mut Area<Self>, facts: &CpuFacts);

    /// Puts the system's extended state aside and loads the hypervisor's.
    fn take_extended_state(area: &mut Area<Self>);

    /// Gives the system its extended state back. From here to the gate nothing may fault.
    fn return_extended_state(area: &mut Area<Self>);

    /// Fills the control block from the live processor, which is native until [`Vendor::run`].
    ///
    /// # Errors
    /// A check that the processor would make fails, or an MSR cannot be read or written.
    fn attach(area: &mut Area<Self>, hardware: &mut impl Hardware) -> Result<(), Code>;

    /// Makes the processor refuse the block, one check at a time.
    #[cfg(feature = "fault-injection")]
    fn corrupt(area: &mut Area<Self>);

    /// Enters the guest; the argument is the area, in RDI. Does not return.
    #[cfg(feature = "image")]
    fn run() -> extern "C" fn() -> !;

    /// Prepares the way out of a native operation that did not enter the guest: everything as it came in,
    /// `result` in RAX.
    fn put_back_native(area: &mut Area<Self>, hardware: &mut impl Hardware, result: Code);

    /// The CPU leaves by itself, where it was interrupted.
    fn depart(area: &mut Area<Self>, hardware: &mut impl Hardware, because: Code) -> Next;

    /// Where the system was interrupted, as the control block has it.
    fn interrupted(area: &mut Area<Self>) -> Interrupted;

    /// What the control block says of the last exit.
    fn last_exit(area: &Area<Self>) -> LastExit;

    /// The event that the next entry delivers, in the words of [`crate::event`]; `None` if there is no guest that
    /// could be given one.
    fn pending_event(area: &Area<Self>, hardware: &mut impl Hardware) -> Option<u64>;

    /// Has the next entry deliver an event without an error code; 0: none.
    fn inject(area: &mut Area<Self>, hardware: &mut impl Hardware, event: u64);

    /// Asks for an exit as soon as the guest can take interrupts, after the event that is injected; or takes that
    /// back.
    fn await_window(area: &mut Area<Self>, hardware: &mut impl Hardware, wanted: bool);

    /// Whether the processor took the entry before the present exit.
    fn was_entered(area: &Area<Self>) -> bool;

    /// True where CPUs can be put back to a snapshot. Elsewhere the next three functions are never called.
    const ROLLS_BACK: bool = false;

    /// Has NMIs and shutdowns of this CPU exit, or not any more.
    fn watch(_: &mut Area<Self>, _: Watch) {}

    /// Returns true if the system is in a handler of NMIs, where no other NMI reaches it.
    fn is_in_nmi(_: &Area<Self>) -> bool {
        false
    }

    /// Sets the system's state to what was saved, on the identity map and with nothing pending.
    fn put_back(_: &mut Area<Self>, _: &SavedCpu) {}

    /// Where the interrupted code goes on behind the handler of a machine check.
    fn resume_at(rip: u64) -> u64;
}

/// Where a task-state segment is.
#[derive(Clone, Copy, Debug)]
pub struct TaskStateSegment {
    /// Selector.
    pub selector: u16,
    /// Limit in bytes.
    pub limit: u32,
    /// Base, virtual.
    pub base_virt: u64,
}

/// An exit, and the system at it, for the record of a crash.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastExit {
    /// Why, as the processor gave it.
    pub code: u64,
    /// First qualification.
    pub info1: u64,
    /// Second qualification.
    pub info2: u64,
    /// Event that was being delivered.
    pub event: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// CR0.
    pub cr0: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// Selector of CS.
    pub cs: u16,
    /// Selector of SS.
    pub ss: u16,
    /// General registers; RAX and RDX are those of [`Cpu::interrupted`].
    pub registers: Registers,
}

/// What to do with an area whose vendor is known only at run time.
pub trait Visitor {
    /// What comes of it.
    type Output;

    /// Does it.
    fn visit<V: Vendor>(self, area: &mut Area<V>) -> Self::Output;
}

/// Has `visitor` look at an area.
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
