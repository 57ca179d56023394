//! The virtual machine control block (APM vol. 2, appendix B).
//!
//! Only the fields that Mercury sets or reads have names. The block is zeroed at load; what has no
//! name here stays zero for ever: AVIC, virtual GIF, virtual NMI, LBR virtualization and SEV stay off
//! (HARDWARE A-41). Clean bits are never set: the processor reloads everything on each VMRUN.

use core::mem::offset_of;

/// A segment register with its hidden part (APM vol. 2, 15.5.1, "Segment state").
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Selector.
    pub selector: u16,
    /// Descriptor bits 55:52 in bits 11:8 and 47:40 in bits 7:0.
    pub attributes: u16,
    /// Limit in bytes.
    pub limit: u32,
    /// Base, virtual.
    pub base: u64,
}

/// The control block.
#[repr(C, align(4096))]
#[derive(Clone, Debug)]
pub struct Vmcb {
    /// Intercepts of CR and DR accesses and of exceptions: none.
    pub intercept_cr_dr_exceptions: [u32; 3],
    /// Intercept word 3.
    pub intercept_misc1: u32,
    /// Intercept word 4.
    pub intercept_misc2: u32,
    reserved1: [u8; 0x48 - 0x14],
    /// Host-physical address of the MSR permission map, 8 KiB.
    pub msrpm_phys: u64,
    /// Added to the TSC in the guest: always 0.
    pub tsc_offset: u64,
    /// Address-space identifier, not 0.
    pub asid: u32,
    /// 1: VMRUN flushes every translation of every identifier (APM vol. 2, 15.16.1).
    pub tlb_control: u32,
    /// Virtual interrupt control: off.
    pub virtual_interrupt: u64,
    /// Bit 0: the guest is in an interrupt shadow.
    pub interrupt_shadow: u64,
    /// Why the guest was left.
    pub exit_code: u64,
    /// First qualification.
    pub exit_info1: u64,
    /// Second qualification.
    pub exit_info2: u64,
    /// Event that was being delivered.
    pub exit_event: u64,
    /// Bit 0: nested paging.
    pub nested_control: u64,
    reserved2: [u8; 0xA8 - 0x98],
    /// Event to deliver at the next VMRUN.
    pub inject_event: u64,
    /// Host-physical address of the nested root table.
    pub nested_cr3: u64,
    /// LBR virtualization: off.
    pub lbr_control: u64,
    /// Clean bits: always 0.
    pub clean: u64,
    /// Next instruction, where the processor saves it.
    pub next_rip: u64,
    reserved3: [u8; 0x400 - 0xD0],

    /// ES.
    pub es: Segment,
    /// CS.
    pub cs: Segment,
    /// SS.
    pub ss: Segment,
    /// DS.
    pub ds: Segment,
    /// FS: VMSAVE and VMLOAD.
    pub fs: Segment,
    /// GS: VMSAVE and VMLOAD.
    pub gs: Segment,
    /// GDTR.
    pub gdtr: Segment,
    /// LDTR: VMSAVE and VMLOAD.
    pub ldtr: Segment,
    /// IDTR.
    pub idtr: Segment,
    /// TR: VMSAVE and VMLOAD.
    pub tr: Segment,
    reserved4: [u8; 0x4CB - 0x4A0],
    /// Current privilege level.
    pub cpl: u8,
    reserved5: u32,
    /// EFER.
    pub efer: u64,
    reserved6: [u8; 0x548 - 0x4D8],
    /// CR4.
    pub cr4: u64,
    /// CR3.
    pub cr3: u64,
    /// CR0.
    pub cr0: u64,
    /// DR7.
    pub dr7: u64,
    /// DR6.
    pub dr6: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// RIP.
    pub rip: u64,
    reserved7: [u8; 0x5D8 - 0x580],
    /// RSP.
    pub rsp: u64,
    /// S_CET.
    pub s_cet: u64,
    /// SSP.
    pub ssp: u64,
    /// ISST_ADDR.
    pub isst_addr: u64,
    /// RAX.
    pub rax: u64,
    /// STAR, LSTAR, CSTAR, SFMASK, KernelGSBase, SYSENTER_CS, _ESP, _EIP: VMSAVE and VMLOAD.
    pub syscall: [u64; 8],
    /// CR2.
    pub cr2: u64,
    reserved8: [u8; 0x668 - 0x648],
    /// PAT of the guest under nested paging.
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
            // SAFETY: the word is inside of the block, which is larger and more aligned than a word, and all of
            // whose fields are integers: any bits are a value.
            unsafe { *words.add(offset / 8) ^= bits };
        }
    }

    /// Asks for an exit as soon as the guest can take interrupts: after the event that is injected, at the
    /// latest when its handler lets interrupts in again (APM vol. 2, 15.21.4). Or takes that back.
    pub fn await_window(&mut self, wanted: bool) {
        if wanted {
            self.intercept_misc1 |= INTERCEPT_VINTR;
            self.virtual_interrupt |= VIRTUAL_INTERRUPT;
        } else {
            self.intercept_misc1 &= !INTERCEPT_VINTR;
            self.virtual_interrupt &= !VIRTUAL_INTERRUPT;
        }
    }

    /// Whether such an exit was asked for.
    #[must_use]
    pub const fn awaits_window(&self) -> bool {
        self.intercept_misc1 & INTERCEPT_VINTR != 0
    }
}

/// What of the guest's state VMRUN loads and #VMEXIT saves: enough to go on natively.
#[derive(Clone, Copy, Debug, Default)]
pub struct GuestState {
    segments: [Segment; 4],
    tables: [Segment; 2],
    registers: [u64; 10],
    cpl: u8,
}

impl GuestState {
    /// The state in a block.
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

    /// Puts it into a block.
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

/// Intercept word 3: INVLPGA and the MSR permission map (APM vol. 2, B.1). Not INIT: an INIT that is
/// not intercepted resets the CPU to native, as it should (HARDWARE A-30). Not shutdown: the native
/// reset is right (M-1). Not SMI.
pub const INTERCEPT_MISC1: u32 = INTERCEPT_INVLPGA | 1 << 28;
/// Intercept word 3: INVLPGA.
pub const INTERCEPT_INVLPGA: u32 = 1 << 26;
/// Intercept word 3: physical interrupts, NMIs, SMIs, INIT and virtual interrupts, so that nothing is delivered.
pub const INTERCEPT_ALL_EVENTS: u32 = 0x1F;
/// Intercept word 3: the guest could take a virtual interrupt.
pub const INTERCEPT_VINTR: u32 = 1 << 4;
/// Intercept word 3: NMIs. The processor holds one that comes in.
pub const INTERCEPT_NMI: u32 = 1 << 1;
/// Intercept word 3: IRET, before it unblocks NMIs.
pub const INTERCEPT_IRET: u32 = 1 << 20;
/// Intercept word 3: shutdown, which a triple fault is.
pub const INTERCEPT_SHUTDOWN: u32 = 1 << 31;
/// [`Vmcb::virtual_interrupt`]: one is pending, of the highest priority and whatever the TPR (V_IRQ,
/// V_INTR_PRIO, V_IGN_TPR; APM vol. 2, 15.21.4).
pub const VIRTUAL_INTERRUPT: u64 = 1 << 8 | 15 << 16 | 1 << 20;
/// [`Vmcb::virtual_interrupt`]: RFLAGS.IF as it was at VMRUN masks physical interrupts, not the guest's own
/// (V_INTR_MASKING; APM vol. 2, 15.21.1).
pub const VIRTUAL_MASKING: u64 = 1 << 24;
/// [`Vmcb::virtual_interrupt`]: AVIC is on (APM vol. 2, 15.29).
pub const VIRTUAL_APIC: u64 = 1 << 31;
/// [`Vmcb::nested_control`]: the guest's memory or its registers are encrypted (SEV, SEV-ES; APM vol. 2, 15.34).
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
/// [`Vmcb::tlb_control`]: flush everything. Neither emulator looks at it (HARDWARE ): the value
/// is right by APM vol. 2, 15.16.1, table 15-9, and every exit clears it again.
pub const TLB_FLUSH_ALL: u32 = 1;
/// [`Vmcb::tlb_control`]: flush nothing.
pub const TLB_KEEP: u32 = 0;

/// Exit codes (APM vol. 2, appendix C).
pub mod exit_code {
    /// A physical interrupt.
    pub const INTR: u64 = 0x60;
    /// An NMI.
    pub const NMI: u64 = 0x61;
    /// IRET.
    pub const IRET: u64 = 0x74;
    /// Shutdown.
    pub const SHUTDOWN: u64 = 0x7F;
    /// An MSR access that the permission map intercepts.
    pub const MSR: u64 = 0x7C;
    /// The guest could take a virtual interrupt.
    pub const VINTR: u64 = 0x64;
    /// INVLPGA.
    pub const INVLPGA: u64 = 0x7A;
    /// VMRUN.
    pub const VMRUN: u64 = 0x80;
    /// VMMCALL.
    pub const VMMCALL: u64 = 0x81;
    /// VMLOAD.
    pub const VMLOAD: u64 = 0x82;
    /// VMSAVE.
    pub const VMSAVE: u64 = 0x83;
    /// STGI.
    pub const STGI: u64 = 0x84;
    /// CLGI.
    pub const CLGI: u64 = 0x85;
    /// SKINIT.
    pub const SKINIT: u64 = 0x86;
    /// Nested page fault.
    pub const NPF: u64 = 0x400;
    /// VMRUN found an illegal state.
    pub const INVALID: u64 = u64::MAX;
}

/// [`Vmcb::inject_event`] and [`Vmcb::exit_event`]; an error code is in bits 63:32.
pub use crate::event;
