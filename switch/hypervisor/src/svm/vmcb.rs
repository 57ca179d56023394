//! The virtual machine control block (APM vol. 2, appendix B).
//!
//! Only the fields that Mercury sets or reads have names. The block is zeroed at load, and fields without a
//! name stay zero for ever: AVIC, virtual GIF, virtual NMI, LBR virtualization and SEV stay off (HARDWARE
//! Clean bits are never set: the processor reloads everything on each VMRUN.

use core::mem::offset_of;

/// A segment register with its hidden part (APM vol. 2, 15.5.1, "Segment state"), as the driver hands it
/// over.
pub use mercury_abi::gate::Segment;

/// The virtual machine control block. Offsets and sections are those of APM vol. 2.
#[repr(C, align(4096))]
#[derive(Clone, Debug)]
pub struct Vmcb {
    /// Intercepts of CR and DR accesses and of exceptions, words 0 to 2: none, or [`INTERCEPT_CR3_WRITE`]
    /// (B.1).
    pub intercept_cr_dr_exceptions: [u32; 3],
    /// Intercept word 3, instructions and events: [`INTERCEPT_MISC1`] (B.1).
    pub intercept_misc1: u32,
    /// Intercept word 4, SVM's instructions: [`INTERCEPT_MISC2`] (B.1).
    pub intercept_misc2: u32,
    reserved1: [u8; 0x48 - 0x14],
    /// Host-physical address of the MSR permission map, 8 KiB.
    pub msrpm_phys: u64,
    /// TSC_OFFSET in ticks, added to the guest's TSC: always 0 (15.30.5).
    pub tsc_offset: u64,
    /// Guest ASID, not 0 (15.16).
    pub asid: u32,
    /// TLB_CONTROL: translations that VMRUN flushes, [`TLB_KEEP`] or [`TLB_FLUSH_ALL`] (15.16.1).
    pub tlb_control: u32,
    /// V_TPR, V_IRQ and V_INTR_MASKING: virtual interrupt control, off as a rule (15.21).
    pub virtual_interrupt: u64,
    /// INTERRUPT_SHADOW in bit 0: interrupts are blocked for one instruction (15.21.5).
    pub interrupt_shadow: u64,
    /// EXITCODE: the reason that the guest was left ([`exit_code`]; appendix C).
    pub exit_code: u64,
    /// EXITINFO1: first qualification of the exit; its meaning depends on the code.
    pub exit_info1: u64,
    /// EXITINFO2: second qualification; for a nested page fault the guest-physical address.
    pub exit_info2: u64,
    /// EXITINTINFO: the event that was being delivered at the exit (15.7.2).
    pub exit_event: u64,
    /// NP_ENABLE in bit 0: nested paging is on; other bits are encryption (15.25).
    pub nested_control: u64,
    reserved2: [u8; 0xA8 - 0x98],
    /// EVENTINJ: the event that the next VMRUN delivers (15.20).
    pub inject_event: u64,
    /// N_CR3: host-physical address of the nested root table (15.25.3).
    pub nested_cr3: u64,
    /// LBR virtualization: always off (15.23).
    pub lbr_control: u64,
    /// VMCB clean bits: always 0, so that VMRUN loads everything (15.15).
    pub clean: u64,
    /// nRIP: virtual address of the next instruction, where the processor saves it (15.7.1).
    pub next_rip: u64,
    reserved3: [u8; 0x400 - 0xD0],

    /// ES of the guest, loaded by VMRUN.
    pub es: Segment,
    /// CS of the guest, loaded by VMRUN.
    pub cs: Segment,
    /// SS of the guest, loaded by VMRUN.
    pub ss: Segment,
    /// DS of the guest, loaded by VMRUN.
    pub ds: Segment,
    /// FS, loaded by VMLOAD and saved by VMSAVE.
    pub fs: Segment,
    /// GS, loaded by VMLOAD and saved by VMSAVE.
    pub gs: Segment,
    /// GDTR of the guest: limit and virtual base.
    pub gdtr: Segment,
    /// LDTR, loaded by VMLOAD and saved by VMSAVE.
    pub ldtr: Segment,
    /// IDTR of the guest: limit and virtual base.
    pub idtr: Segment,
    /// TR, loaded by VMLOAD and saved by VMSAVE.
    pub tr: Segment,
    reserved4: [u8; 0x4CB - 0x4A0],
    /// Current privilege level of the guest, 0 to 3.
    pub cpl: u8,
    reserved5: u32,
    /// EFER of the guest, with SVME set as VMRUN demands.
    pub efer: u64,
    reserved6: [u8; 0x548 - 0x4D8],
    /// CR4 of the guest, as it is.
    pub cr4: u64,
    /// CR3 of the guest: guest-physical root of its tables.
    pub cr3: u64,
    /// CR0 of the guest, as it is.
    pub cr0: u64,
    /// DR7 of the guest: breakpoint control.
    pub dr7: u64,
    /// DR6 of the guest: breakpoint status.
    pub dr6: u64,
    /// RFLAGS of the guest, as it is.
    pub rflags: u64,
    /// RIP of the guest, virtual.
    pub rip: u64,
    reserved7: [u8; 0x5D8 - 0x580],
    /// RSP of the guest, virtual.
    pub rsp: u64,
    /// S_CET of the guest: control-flow enforcement.
    pub s_cet: u64,
    /// SSP of the guest: shadow-stack pointer, virtual.
    pub ssp: u64,
    /// ISST_ADDR of the guest: interrupt shadow-stack table, virtual.
    pub isst_addr: u64,
    /// RAX of the guest; VMRUN itself needs RAX.
    pub rax: u64,
    /// STAR, LSTAR, CSTAR, SFMASK, KernelGSBase, SYSENTER_CS, SYSENTER_ESP, SYSENTER_EIP: loaded by VMLOAD
    /// and saved by VMSAVE.
    pub syscall: [u64; 8],
    /// CR2 of the guest: address of its last page fault.
    pub cr2: u64,
    reserved8: [u8; 0x668 - 0x648],
    /// G_PAT: the guest's PAT under nested paging (15.25.8).
    pub g_pat: u64,
    reserved9: [u8; 0x6E0 - 0x670],
    /// SPEC_CTRL of the guest, where the processor virtualizes it.
    pub spec_ctrl: u64,
    reserved10: [u8; 0x1000 - 0x6E8],
}

const _: () = {
    assert!(size_of::<Vmcb>() == 4096);
    assert!(offset_of!(Vmcb, intercept_misc1) == 0x00C);
    assert!(offset_of!(Vmcb, msrpm_phys) == 0x048);
    assert!(offset_of!(Vmcb, asid) == 0x058);
    assert!(offset_of!(Vmcb, tlb_control) == 0x05C);
    assert!(offset_of!(Vmcb, interrupt_shadow) == 0x068);
    assert!(offset_of!(Vmcb, exit_code) == 0x070);
    assert!(offset_of!(Vmcb, exit_event) == 0x088);
    assert!(offset_of!(Vmcb, nested_control) == 0x090);
    assert!(offset_of!(Vmcb, inject_event) == 0x0A8);
    assert!(offset_of!(Vmcb, nested_cr3) == 0x0B0);
    assert!(offset_of!(Vmcb, clean) == 0x0C0);
    assert!(offset_of!(Vmcb, next_rip) == 0x0C8);
    assert!(offset_of!(Vmcb, es) == 0x400);
    assert!(offset_of!(Vmcb, tr) == 0x490);
    assert!(offset_of!(Vmcb, cpl) == 0x4CB);
    assert!(offset_of!(Vmcb, efer) == 0x4D0);
    assert!(offset_of!(Vmcb, cr4) == 0x548);
    assert!(offset_of!(Vmcb, rip) == 0x578);
    assert!(offset_of!(Vmcb, rsp) == 0x5D8);
    assert!(offset_of!(Vmcb, s_cet) == 0x5E0);
    assert!(offset_of!(Vmcb, isst_addr) == 0x5F0);
    assert!(offset_of!(Vmcb, rax) == 0x5F8);
    assert!(offset_of!(Vmcb, cr2) == 0x640);
    assert!(offset_of!(Vmcb, g_pat) == 0x668);
    assert!(offset_of!(Vmcb, spec_ctrl) == 0x6E0);
};

impl Vmcb {
    /// Flips bits of the aligned 64-bit word at a byte offset, if there is one.
    #[cfg(feature = "fault-injection")]
    pub fn flip(&mut self, offset: usize, bits: u64) {
        let words = core::ptr::from_mut(self).cast::<u64>();
        if offset.is_multiple_of(8) && offset < size_of::<Self>() {
            // SAFETY: the word is inside of the block, which is larger and more aligned than a word, and
            // all of whose fields are integers: any bits are a value.
            unsafe { *words.add(offset / 8) ^= bits };
        }
    }

    /// Asks for an exit as soon as the guest can take interrupts, or takes the request back. The exit comes
    /// after the injected event, at the latest when its handler lets interrupts in again (APM vol. 2,
    /// 15.21.4).
    pub fn await_window(&mut self, wanted: bool) {
        if wanted {
            self.intercept_misc1 |= INTERCEPT_VINTR;
            self.virtual_interrupt |= VIRTUAL_INTERRUPT;
        } else {
            self.intercept_misc1 &= !INTERCEPT_VINTR;
            self.virtual_interrupt &= !VIRTUAL_INTERRUPT;
        }
    }

    /// Returns true if [`Vmcb::await_window`] asked for an exit.
    #[must_use]
    pub const fn awaits_window(&self) -> bool {
        self.intercept_misc1 & INTERCEPT_VINTR != 0
    }
}

/// State of the guest that VMRUN loads and #VMEXIT saves: enough to go on natively.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestState {
    segments: [Segment; 4],
    tables: [Segment; 2],
    registers: [u64; 10],
    cpl: u8,
}

impl GuestState {
    /// Reads the state in a block.
    #[must_use]
    pub fn of(block: &Vmcb) -> Self {
        Self {
            segments: [block.es, block.cs, block.ss, block.ds],
            tables: [block.gdtr, block.idtr],
            registers: [
                block.rip,
                block.rsp,
                block.rflags,
                block.rax,
                block.cr0,
                block.cr2,
                block.cr3,
                block.cr4,
                block.dr6,
                block.dr7,
            ],
            cpl: block.cpl,
        }
    }

    /// Writes the state into a block.
    pub fn put(&self, block: &mut Vmcb) {
        [block.es, block.cs, block.ss, block.ds] = self.segments;
        [block.gdtr, block.idtr] = self.tables;
        [
            block.rip,
            block.rsp,
            block.rflags,
            block.rax,
            block.cr0,
            block.cr2,
            block.cr3,
            block.cr4,
            block.dr6,
            block.dr7,
        ] = self.registers;
        block.cpl = self.cpl;
    }
}

/// Intercept word 0: writes of CR3.
pub const INTERCEPT_CR3_WRITE: u32 = 1 << 19;
/// Intercept word 3: INVLPGA and the MSR permission map (APM vol. 2, B.1). Not INIT: an INIT that is
/// not intercepted resets the CPU to native, as it should (HARDWARE A-30). Not shutdown: the native
/// reset is right (M-1). Not SMI.
pub const INTERCEPT_MISC1: u32 = INTERCEPT_INVLPGA | 1 << 28;
/// Intercept word 3: INVLPGA.
pub const INTERCEPT_INVLPGA: u32 = 1 << 26;
/// Intercept word 3: physical interrupts, NMIs, SMIs, INIT and virtual interrupts, so that no event is
/// delivered.
pub const INTERCEPT_ALL_EVENTS: u32 = 0x1F;
/// Intercept word 3: the guest could take a virtual interrupt.
pub const INTERCEPT_VINTR: u32 = 1 << 4;
/// Intercept word 3: NMIs. One that arrives stays pending in the processor.
pub const INTERCEPT_NMI: u32 = 1 << 1;
/// Intercept word 3: IRET, before it unblocks NMIs.
pub const INTERCEPT_IRET: u32 = 1 << 20;
/// Intercept word 3: shutdown, the end of a triple fault.
pub const INTERCEPT_SHUTDOWN: u32 = 1 << 31;
/// [`Vmcb::virtual_interrupt`]: one is pending, of the highest priority and whatever the TPR (V_IRQ,
/// V_INTR_PRIO, V_IGN_TPR; APM vol. 2, 15.21.4).
pub const VIRTUAL_INTERRUPT: u64 = 1 << 8 | 15 << 16 | 1 << 20;
/// [`Vmcb::virtual_interrupt`]: RFLAGS.IF as it was at VMRUN masks physical interrupts, not the guest's own
/// (V_INTR_MASKING; APM vol. 2, 15.21.1).
pub const VIRTUAL_MASKING: u64 = 1 << 24;
/// [`Vmcb::virtual_interrupt`]: AVIC is on (APM vol. 2, 15.29).
pub const VIRTUAL_APIC: u64 = 1 << 31;
/// [`Vmcb::nested_control`]: the guest's memory or its registers are encrypted (SEV, SEV-ES; APM vol. 2,
/// 15.34).
pub const NESTED_CONTROL_ENCRYPTED: u8 = 1 << 1 | 1 << 2;
/// Intercept word 4: VMRUN (the processor demands it), VMMCALL, VMLOAD, VMSAVE, STGI, CLGI, SKINIT.
pub const INTERCEPT_MISC2: u32 = 0x7F;
/// Intercept word 4 while the system above uses SVM: VMRUN, VMMCALL and SKINIT.
pub const INTERCEPT_MISC2_SHARED: u32 = 0x43;
/// Intercept word 4: VMSAVE.
pub const INTERCEPT_VMSAVE: u32 = 1 << 3;
/// Intercept word 4: STGI.
pub const INTERCEPT_STGI: u32 = 1 << 4;
/// Intercept word 4: CLGI.
pub const INTERCEPT_CLGI: u32 = 1 << 5;
/// [`Vmcb::tlb_control`]: flush every translation of every identifier. Neither emulator heeds it (HARDWARE
/// The value is right by APM vol. 2, 15.16.1, table 15-9, and every exit clears it again.
pub const TLB_FLUSH_ALL: u32 = 1;
/// [`Vmcb::tlb_control`]: flush nothing.
pub const TLB_KEEP: u32 = 0;

/// Exit codes (APM vol. 2, appendix C).
pub mod exit_code {
    /// Guest is about to write CR3.
    pub const CR3_WRITE: u64 = 0x13;
    /// Physical interrupt arrived.
    pub const INTR: u64 = 0x60;
    /// NMI arrived, and stays pending.
    pub const NMI: u64 = 0x61;
    /// Guest is about to execute IRET.
    pub const IRET: u64 = 0x74;
    /// Shutdown: a triple fault.
    pub const SHUTDOWN: u64 = 0x7F;
    /// An MSR access that the permission map intercepts.
    pub const MSR: u64 = 0x7C;
    /// The guest could take a virtual interrupt.
    pub const VINTR: u64 = 0x64;
    /// Guest executed INVLPGA.
    pub const INVLPGA: u64 = 0x7A;
    /// Guest executed VMRUN itself.
    pub const VMRUN: u64 = 0x80;
    /// Guest executed VMMCALL.
    pub const VMMCALL: u64 = 0x81;
    /// Guest executed VMLOAD.
    pub const VMLOAD: u64 = 0x82;
    /// Guest executed VMSAVE.
    pub const VMSAVE: u64 = 0x83;
    /// Guest executed STGI: sets GIF.
    pub const STGI: u64 = 0x84;
    /// Guest executed CLGI: clears GIF.
    pub const CLGI: u64 = 0x85;
    /// Guest executed SKINIT.
    pub const SKINIT: u64 = 0x86;
    /// Nested page fault: the nested tables do not permit an access.
    pub const NPF: u64 = 0x400;
    /// VMRUN found an illegal state.
    pub const INVALID: u64 = u64::MAX;
}

/// [`Vmcb::inject_event`] and [`Vmcb::exit_event`]; an error code is in bits 63:32.
pub use crate::event;
