//! Intel: Virtual Machine Extensions with extended page tables and unrestricted guest (SDM volume 3, part
//! "Virtual machine extensions").
//!
//! * [`vmcs`]: the control structure's fields;
//! * [`capture`]: live state of a native CPU into the control structure, and back at a departure;
//! * [`run`]: the world switch, and CPUID;
//! * [`quick`]: the driver's hypercalls; [`exits`]: everything else that the processor reported, in the
//!   words of [`crate::exit`];
//! * [`msr`]: the MSRs that must not be written unseen;
//! * [`refusal`]: why an entry was refused;
//! * `rollback`: NMIs beneath a snapshot that is kept, and the way back to it;
//! * [`reset`]: INIT and the start-up IPI, which AMD's processors deal with themselves.

pub mod capture;
pub mod exits;
#[cfg(feature = "fault-injection")]
mod faults;
pub mod msr;
pub mod quick;
pub mod refusal;
pub mod reset;
mod rollback;
pub mod run;
#[cfg(test)]
mod tests;
pub mod vmcs;

use mercury_abi::code::Code;
use mercury_abi::facts::{CpuFacts, CpuidLeaf, TableRegister};
use mercury_abi::gate::{BootInfo, DescriptorTable, Vendor as Kind};
use mercury_abi::restart::SavedCpu;
use mercury_abi::shared::EXIT_CODE_VMX;
use mercury_preflight::vmx::{Controls, ept_vpid};

use crate::address::HostPhys;
use crate::cpu::Interrupted;
use crate::host::entry::Next;
use crate::nested::Tables;
use crate::paging::format::IntelExtended;
use crate::paging::plan::LargestPage;
use crate::paging::table::Depth;
use crate::snapshot::rollback::Watch;
use crate::vendor::{LastExit, TaskStateSegment, Vendor};
use crate::x86::{self, Hardware, Processor};
use vmcs::Vmcs;

/// Intel's vendor folder, for [`crate::vendor`].
#[derive(Debug)]
pub struct Vmx;

/// A CPU's area on Intel. The second page holds the GDT of a departure.
pub type Area = crate::cpu::Area<Vmx>;

/// TR or LDTR of the system.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SystemSegment {
    /// Selector, as software loads it.
    pub selector: u16,
    /// As in the VMCS: type, S, DPL, P in bits 7:0; AVL, L, D/B, G in bits 15:12; bit 16 if unusable.
    pub attributes: u32,
    /// Limit in bytes, as in the descriptor.
    pub limit: u32,
    /// Base address, virtual.
    pub base_virt: u64,
}

impl SystemSegment {
    /// Bit of the type that says a task-state segment is in use.
    pub const BUSY: u32 = 1 << 1;
    const PRESENT: u32 = 1 << 7;
    const GRANULARITY: u32 = 1 << 15;

    /// Returns true if there is a segment at all.
    #[must_use]
    pub const fn is_usable(&self) -> bool {
        self.selector & !3 != 0 && self.attributes & Self::PRESENT != 0 && self.attributes & 1 << 16 == 0
    }

    /// Returns the segment's descriptor of 16 bytes (SDM volume 3, "TSS descriptor in 64-bit mode").
    #[must_use]
    pub const fn descriptor(&self) -> [u64; 2] {
        let limit =
            if self.attributes & Self::GRANULARITY != 0 { self.limit >> 12 } else { self.limit } as u64;
        let low = limit & 0xFFFF
            | (self.base_virt & 0xFF_FFFF) << 16
            | (self.attributes as u64 & 0xFF) << 40
            | (limit >> 16 & 0xF) << 48
            | (self.attributes as u64 >> 12 & 0xF) << 52
            | (self.base_virt >> 24 & 0xFF) << 56;
        [low, self.base_virt >> 32]
    }
}

/// The GDT of a departure: the hypervisor's code and data, and the system's TR and LDTR at its own selectors.
#[repr(C, align(4096))]
#[derive(Clone, Debug)]
pub struct LeaveGdt([u64; 512]);

impl LeaveGdt {
    /// Returns a GDT with code and data only.
    #[must_use]
    pub const fn new() -> Self {
        let mut table = [0; 512];
        (table[2], table[3]) = (crate::host::tables::CODE_DESCRIPTOR, crate::host::tables::DATA_DESCRIPTOR);
        Self(table)
    }

    /// Returns the index of a system segment's descriptor, if it can stand here: in the GDT, beside the fixed
    /// ones.
    #[must_use]
    pub const fn index(selector: u16) -> Option<usize> {
        let index = (selector >> 3) as usize;
        if selector & 4 == 0 && index > 3 && index < 511 { Some(index) } else { None }
    }

    /// Writes the descriptor of a segment to the place that its selector names.
    pub fn put(&mut self, segment: &SystemSegment) {
        if let (Some(index), true) = (Self::index(segment.selector), segment.is_usable()) {
            let [low, high] = segment.descriptor();
            self.0[index] = low;
            self.0[index + 1] = high;
        }
    }

    /// Marks a task-state segment available, as LTR demands. Returns true if there is one.
    #[inline]
    pub fn release(&mut self, selector: u16) -> bool {
        const BUSY: u64 = (SystemSegment::BUSY as u64) << 40;
        let Some(slot) = self.0.get_mut((selector >> 3) as usize) else { return false };
        *slot &= !BUSY;
        *slot != 0
    }
}

impl Default for LeaveGdt {
    fn default() -> Self {
        Self::new()
    }
}

/// Data that Intel's folder keeps of a CPU, besides the control structure, which software cannot read as
/// memory.
#[repr(C)]
#[derive(Debug)]
pub struct Own {
    /// The controls that preflight found; all zeros before.
    pub controls: Controls,
    /// VMCS revision identifier.
    pub revision: u32,
    /// 1 once the VMCS has been entered since it was loaded: VMRESUME instead of VMLAUNCH.
    pub launched: u32,
    /// 1 while the CPU is in VMX operation.
    pub vmx_on: u32,
    /// 1 after VMLAUNCH or VMRESUME failed, until the failure is answered.
    pub failed: u8,
    /// 1 if the failure was VMfailInvalid.
    pub failed_invalid: u8,
    /// EFER at the attach, which the processor has in the hypervisor.
    pub host_efer: u64,
    /// PAT at the attach, which the processor has in the hypervisor.
    pub host_pat: u64,
    /// FS base, GS base, SYSENTER_CS, _ESP and _EIP at the attach.
    pub captured: [u64; 5],
    /// DEBUGCTL at the attach.
    pub captured_debugctl: u64,
    /// S_CET and IA32_INTERRUPT_SSP_TABLE_ADDR at the attach, where they exist.
    pub captured_cet: [u64; 2],
    /// IA32_VMX_CR4_FIXED1: bits that a guest may set.
    pub cr4_allowed: u64,
    /// GDTR of the [`LeaveGdt`].
    pub leave_gdtr: DescriptorTable,
    /// TR that the next departure gives back.
    pub tr: SystemSegment,
    /// LDTR that the next departure gives back.
    pub ldtr: SystemSegment,
    /// The last exit that [`exits`] has read.
    pub exit: LastExit,
    /// 1 once the system above is another one than attached: INIT has reset it, or it has cleared CR4.VMXE on
    /// its way to another kernel.
    pub foreign: u32,
    /// 1 if the CPU wanted to leave and could not: the gate cannot go there, or an entry there was refused.
    /// It gets one more try.
    pub refused_to_leave: u32,
    /// 1 while an exit is asked for as soon as the guest can take interrupts.
    pub awaits_window: u32,
    /// 1 while NMIs exit.
    pub watched: u32,
    /// 1 while an NMI of the system's waits until the guest can take it.
    pub nmi_waits: u32,
    /// 1 if an NMI turned the CPU back on its way into the guest, until that is answered.
    pub turned_back: u32,
}

static TABLES: Tables<IntelExtended> = Tables::new();

impl Vendor for Vmx {
    const KIND: Kind = Kind::Intel;
    const TYPES_FROM_MTRRS: bool = true;
    type Own = Own;
    type Control = Vmcs;
    type Host = LeaveGdt;
    type Format = IntelExtended;

    fn tables() -> &'static Tables<IntelExtended> {
        &TABLES
    }

    fn physical_bits(hardware: &mut impl Hardware) -> u32 {
        let leaf = |[eax, ebx, ecx, edx]: [u32; 4]| CpuidLeaf { eax, ebx, ecx, edx };
        let cpuid_8000_0008 = leaf(hardware.cpuid(0x8000_0008, 0));
        mercury_preflight::physical_bits(&CpuFacts { cpuid_8000_0008, ..CpuFacts::default() })
    }

    fn largest_page(hardware: &mut impl Hardware) -> LargestPage {
        let capabilities = hardware.read_msr(x86::msr::VMX_EPT_VPID_CAP).unwrap_or(0);
        if capabilities & ept_vpid::PAGE_1G != 0 {
            LargestPage::OneGibibyte
        } else {
            LargestPage::TwoMebibytes
        }
    }

    /// Returns four levels, which reach 48 bits, or five. Intel's nested depth is free (HARDWARE I-18).
    fn depth(_: &BootInfo, hardware: &mut impl Hardware) -> Depth {
        let capabilities = hardware.read_msr(x86::msr::VMX_EPT_VPID_CAP).unwrap_or(0);
        let wide = Self::physical_bits(hardware) > Depth::Four.address_bits();
        if wide && capabilities & ept_vpid::WALK_5 != 0 { Depth::Five } else { Depth::Four }
    }

    fn top_of_memory_2(_: &mut impl Hardware) -> Option<u64> {
        None
    }

    fn prepare(area: &mut Area, _: TaskStateSegment) {
        area.host = LeaveGdt::new();
        let base_virt = core::ptr::from_ref(&area.host).expose_provenance() as u64;
        let limit = size_of::<LeaveGdt>() as u64 - 1;
        area.own.leave_gdtr = DescriptorTable::new(TableRegister { base_virt, limit });
        let nmi = &mut area.cpu.gate.nmi;
        [nmi.window_start_virt, nmi.window_end_virt, nmi.restart_virt] = run::nmi_window();
    }

    fn features(facts: &CpuFacts) -> u32 {
        capture::features(facts)
    }

    fn learn(area: &mut Area, facts: &CpuFacts) {
        capture::learn(area, facts);
    }

    #[inline(always)]
    fn save_extended_state(area: &mut Area) {
        run::save_extended_state(area);
    }

    #[inline(always)]
    fn restore_extended_state(area: &mut Area) {
        run::restore_extended_state(area);
    }

    #[inline(always)]
    fn attach(area: &mut Area, hardware: &mut impl Hardware) -> Result<(), Code> {
        capture::attach(area, hardware)
    }

    #[cfg(feature = "fault-injection")]
    fn corrupt(area: &mut Area) {
        faults::before_first_entry(area, &mut Processor);
    }

    #[cfg(feature = "image")]
    fn run() -> extern "C" fn() -> ! {
        run::run
    }

    fn put_back_native(area: &mut Area, hardware: &mut impl Hardware, result: Code) {
        capture::put_back_native(area, hardware, result);
    }

    fn depart(area: &mut Area, hardware: &mut impl Hardware, because: Code) -> Next {
        exits::depart(area, hardware, because)
    }

    /// Reads the VMCS. Only a failure in the world switch or in a quick answer asks, and then there is no
    /// other copy.
    fn shut_down(area: &mut Area, hardware: &mut impl Hardware) -> Next {
        reset::shut_down(area, hardware)
    }

    fn interrupted(area: &mut Area) -> Interrupted {
        let hardware = &mut Processor;
        exits::note_exit(area, hardware);
        let registers = &area.cpu.gate.outward.registers;
        Interrupted { rip: hardware.vmread(vmcs::GUEST_RIP), rax: registers[0], rdx: registers[2] }
    }

    fn last_exit(area: &Area) -> LastExit {
        LastExit { code: EXIT_CODE_VMX | area.own.exit.code, ..area.own.exit }
    }

    /// Returns the event, unless the CPU waits for a start-up IPI: then it takes no event (SDM, "Checks on
    /// guest non-register state").
    fn pending_event(area: &Area, hardware: &mut impl Hardware) -> Option<u64> {
        let takes =
            area.own.vmx_on != 0 && hardware.vmread(vmcs::GUEST_ACTIVITY) != vmcs::activity::WAIT_FOR_SIPI;
        takes.then(|| hardware.vmread(vmcs::ENTRY_INTERRUPTION))
    }

    fn inject(_: &mut Area, hardware: &mut impl Hardware, event: u64) {
        hardware.vmwrite(vmcs::ENTRY_INTERRUPTION, event);
    }

    fn await_window(area: &mut Area, hardware: &mut impl Hardware, wanted: bool) {
        exits::await_window(area, hardware, wanted);
    }

    fn was_entered(area: &Area) -> bool {
        !exits::entry_failed(area.own.exit.code as u32)
    }

    fn rolls_back(area: &Area) -> bool {
        area.cpu.features & capture::feature::ROLLBACK != 0
    }

    fn watch(area: &mut Area, hardware: &mut impl Hardware, watch: Watch) {
        rollback::watch(area, hardware, watch);
    }

    /// Returns false: an NMI that fetches a CPU exits wherever the system is.
    fn is_in_nmi(_: &Area) -> bool {
        false
    }

    fn put_back(area: &mut Area, hardware: &mut impl Hardware, saved: &SavedCpu, root: HostPhys) {
        rollback::put_back(area, hardware, saved, root);
    }

    fn resume_at(rip: u64) -> u64 {
        run::resume_at(rip)
    }
}
