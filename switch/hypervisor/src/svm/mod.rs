//! AMD: Secure Virtual Machine with nested paging (APM vol. 2, chapter 15).
//!
//! * [`vmcb`]: the control block's layout;
//! * [`capture`]: live state of a native CPU into the control block, and back at a departure;
//! * [`run`]: the world switch;
//! * [`quick`]: the driver's hypercalls; [`exits`]: everything else that the processor reported, in the
//!   words of [`crate::exit`];
//! * [`msr`]: the MSRs that must not be written unseen;
//! * [`guests`]: the system above uses SVM itself; [`shadow`]: beneath a snapshot;
//! * [`refusal`]: which check of VMRUN a control block fails;
//! * [`stores`]: stores to pages that are read-only for integrity;
//! * [`rollback`]: a CPU is fetched, and put back to a snapshot.

pub mod capture;
pub mod exits;
#[cfg(feature = "fault-injection")]
mod faults;
pub mod guests;
pub mod msr;
pub mod quick;
pub mod refusal;
pub mod rollback;
pub mod run;
pub mod shadow;
pub mod stores;
#[cfg(test)]
mod tests;
pub mod vmcb;

use mercury_abi::code::Code;
use mercury_abi::facts::{CpuFacts, CpuidLeaf, readable};
use mercury_abi::gate::{BootInfo, Vendor as Kind};
use mercury_abi::restart::SavedCpu;

use crate::address::HostPhys;
use crate::cpu::Interrupted;
use crate::host::entry::Next;
use crate::nested::Tables;
use crate::paging::format::AmdNested;
use crate::paging::plan::LargestPage;
use crate::paging::table::Depth;
use crate::snapshot::rollback::Watch;
use crate::vendor::{LastExit, TaskStateSegment, Vendor};
use crate::x86::{self, Hardware};
use vmcb::{GuestState, Segment, Vmcb, exit_code};

/// AMD's vendor folder, for [`crate::vendor`].
#[derive(Debug)]
pub struct Svm;

/// A CPU's area on AMD. The second block is for VMLOAD only.
pub type Area = crate::cpu::Area<Svm>;

/// Data that AMD's folder keeps of a CPU, besides the control block.
#[repr(C)]
#[derive(Debug)]
pub struct Own {
    /// EFER of the guest: every write exits, so this is exact. SVME is what the system above has set itself.
    pub guest_efer: u64,
    /// EFER at the attach, SVME set: what the processor has in the hypervisor.
    pub attach_efer: u64,
    /// VM_HSAVE_PA as the system above believes it to be.
    pub guest_hsave: u64,
    /// State of the guest at the last entry that [`exits`] made. An entry that the processor refuses may
    /// damage the block (QEMU's does).
    pub entry_state: GuestState,
    /// 1 while `entry_state` is that of the last entry.
    pub entry_state_valid: u32,
    /// Work to do around a run of the system's guest: [`guests::LENT`], [`guests::SHADOWED`].
    pub around_guest: u32,
    /// 1 if the world switch may answer VMRUN and STGI of the system above by itself.
    pub quick_guests: u32,
    /// 1: the next entry is into the guest of the system above that its RAX names.
    pub enter_guest: u32,
    /// 1 while GIF is 0 as far as the system above knows.
    pub gif_is_clear: u32,
    /// 1 while an NMI waits that was taken from the processor.
    pub nmi_held: u32,
    /// 1: this exit is that of the system's guest, which runs on a shadow.
    pub guest_exited: u32,
    /// Address-space identifiers for the system above: the two highest that there are. 0: none.
    pub asids: [u32; 2],
    /// Host-physical address of the control block in the window, or [`guests::NO_BLOCK`].
    pub block_phys: u64,
    /// The system's own TR, LDTR and MSRs at the instant of a snapshot that is kept: later a guest's may be
    /// in their place, or what a shutdown leaves.
    pub extended: ExtendedState,
    /// KVM's nested root, while the block has the shadow's.
    pub guest_nested_cr3: u64,
    /// Tables that the system's guest runs on beneath a snapshot.
    pub shadow: shadow::Shadow,
}

/// State that VMSAVE saves, but for FS and GS (APM vol. 2, 15.5.2), and MSRs that each exit saves.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtendedState {
    tr: Segment,
    ldtr: Segment,
    syscall: [u64; 8],
    /// G_PAT, S_CET, SSP, ISST_ADDR and SPEC_CTRL.
    exit: [u64; 5],
    /// 1: it is that of the instant.
    is_kept: u32,
}

impl ExtendedState {
    /// Keeps the state in a block, if none is kept.
    pub const fn keep(&mut self, block: &Vmcb) {
        if self.is_kept == 0 {
            let exit = [block.g_pat, block.s_cet, block.ssp, block.isst_addr, block.spec_ctrl];
            *self = Self { tr: block.tr, ldtr: block.ldtr, syscall: block.syscall, exit, is_kept: 1 };
        }
    }

    /// Forgets the state of the instant.
    pub const fn forget(&mut self) {
        self.is_kept = 0;
    }

    /// Writes the state into a block, if one is kept.
    pub const fn put(&self, block: &mut Vmcb) {
        if self.is_kept != 0 {
            (block.tr, block.ldtr, block.syscall) = (self.tr, self.ldtr, self.syscall);
            [block.g_pat, block.s_cet, block.ssp, block.isst_addr, block.spec_ctrl] = self.exit;
        }
    }
}

static TABLES: Tables<AmdNested> = Tables::new();

fn leaf(number: u32) -> CpuidLeaf {
    let result = core::arch::x86_64::__cpuid(number);
    CpuidLeaf { eax: result.eax, ebx: result.ebx, ecx: result.ecx, edx: result.edx }
}

impl Vendor for Svm {
    const KIND: Kind = Kind::Amd;
    const TYPES_FROM_MTRRS: bool = false;
    type Own = Own;
    type Control = Vmcb;
    type Host = Vmcb;
    type Format = AmdNested;

    fn tables() -> &'static Tables<AmdNested> {
        &TABLES
    }

    fn physical_bits(hardware: &mut impl Hardware) -> u32 {
        let highest = leaf(0x8000_0000);
        let encryption = if highest.eax >= 0x8000_001F { leaf(0x8000_001F) } else { CpuidLeaf::default() };
        let syscfg = hardware.read_msr(x86::msr::SYSCFG);
        mercury_preflight::physical_bits(&CpuFacts {
            cpuid_8000_0000: highest,
            cpuid_8000_0008: leaf(0x8000_0008),
            cpuid_8000_001f: encryption,
            syscfg: syscfg.unwrap_or(0),
            readable: if syscfg.is_some() { readable::SYSCFG } else { 0 },
            ..CpuFacts::default()
        })
    }

    /// Reads CPUID 8000_0001h EDX bit 26: 1 GiB pages (APM vol. 3, appendix E.4).
    fn largest_page(_: &mut impl Hardware) -> LargestPage {
        const GIBIBYTE_PAGES: u32 = 1 << 26;
        if leaf(0x8000_0001).edx & GIBIBYTE_PAGES != 0 {
            LargestPage::OneGibibyte
        } else {
            LargestPage::TwoMebibytes
        }
    }

    /// Returns the host's depth, which the nested tables must have too (APM vol. 2, 15.25.3).
    fn depth(boot: &BootInfo, _: &mut impl Hardware) -> Depth {
        if boot.five_level != 0 { Depth::Five } else { Depth::Four }
    }

    fn top_of_memory_2(hardware: &mut impl Hardware) -> Option<u64> {
        const SYSCFG_TOM2: u64 = 1 << 21 | 1 << 22;
        let syscfg = hardware.read_msr(x86::msr::SYSCFG).unwrap_or(0);
        (syscfg & SYSCFG_TOM2 == SYSCFG_TOM2).then(|| hardware.read_msr(x86::msr::TOP_MEM2)).flatten()
    }

    fn prepare(area: &mut Area, task_state: TaskStateSegment) {
        area.host.tr = Segment {
            selector: task_state.selector,
            attributes: 0x8B,
            limit: task_state.limit,
            base: task_state.base_virt,
        };
    }

    fn features(facts: &CpuFacts) -> u32 {
        capture::features(facts)
    }

    fn learn(area: &mut Area, facts: &CpuFacts) {
        guests::learn(area, facts);
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
        faults::before_first_entry(area);
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

    fn shut_down(_: &mut Area, hardware: &mut impl Hardware) -> Next {
        hardware.shut_down()
    }

    fn interrupted(area: &mut Area) -> Interrupted {
        let rdx = area.cpu.gate.outward.registers[2];
        Interrupted { rip: area.control.rip, rax: area.control.rax, rdx }
    }

    fn last_exit(area: &Area) -> LastExit {
        let control = &area.control;
        let mut registers = area.cpu.gate.outward.registers;
        registers[4] = control.rsp;
        LastExit {
            code: control.exit_code,
            info1: control.exit_info1,
            info2: control.exit_info2,
            event: control.exit_event,
            rflags: control.rflags,
            cr0: control.cr0,
            cr2: control.cr2,
            cr3: control.cr3,
            cr4: control.cr4,
            cs: control.cs.selector,
            ss: control.ss.selector,
            registers,
        }
    }

    fn pending_event(area: &Area, _: &mut impl Hardware) -> Option<u64> {
        Some(area.control.inject_event)
    }

    fn inject(area: &mut Area, _: &mut impl Hardware, event: u64) {
        area.control.inject_event = event;
    }

    fn await_window(area: &mut Area, _: &mut impl Hardware, wanted: bool) {
        area.control.await_window(wanted);
    }

    fn rolls_back(_: &Area) -> bool {
        true
    }

    fn watch(area: &mut Area, _: &mut impl Hardware, watch: Watch) {
        rollback::watch(area, watch);
    }

    fn is_in_nmi(area: &Area) -> bool {
        rollback::is_in_nmi(area)
    }

    fn put_back(area: &mut Area, hardware: &mut impl Hardware, saved: &SavedCpu, root: HostPhys) {
        rollback::put_back(area, hardware, saved, root);
    }

    fn was_entered(area: &Area) -> bool {
        area.control.exit_code != exit_code::INVALID
    }

    fn resume_at(rip: u64) -> u64 {
        rip
    }
}
