//! KVM above Mercury, against the manual and against a native KVM.

use proptest::prelude::*;

use super::*;
use crate::model::{Attached, LINUX_EFER};
use crate::svm::vmcb::{INTERCEPT_MISC1, exit_code};

const RCX: usize = 1;
const RDX: usize = 2;
const RSI: usize = 6;
const KVMS_PAGE: u64 = 0x7_7000;
const BLOCK: u64 = 0x12_3000;

/// A CPU with a window that shows KVM's block.
struct Host {
    cpu: Attached,
    block: Box<Vmcb>,
    entry: Box<u64>,
}

impl Host {
    fn new() -> Self {
        nested::tests::install::<super::super::Svm>();
        let mut host = Self { cpu: Attached::new(), block: Vmcb::zeroed(), entry: Box::new(0) };
        (host.block.asid, host.block.intercept_misc1) = (3, INTERCEPT_NMI);
        let gate = &mut host.cpu.area.cpu.gate;
        gate.window_virt = (&raw mut *host.block).expose_provenance() as u64;
        gate.window_entry_virt = (&raw mut *host.entry).expose_provenance() as u64;
        host.allow(1);
        host
    }

    /// Returns a system that has set EFER.SVME.
    fn with_svm() -> Self {
        let mut host = Self::new();
        assert_eq!(host.write(msr::EFER, LINUX_EFER | msr::EFER_SVME), Next::Run);
        assert_eq!(host.write(msr::VM_HSAVE_PA, KVMS_PAGE), Next::Run);
        host
    }

    fn allow(&mut self, may: u32) {
        self.cpu.area.shared().kvm_may = may;
    }

    fn exit(&mut self, code: u64) -> Next {
        let next = self.cpu.exit(code);
        settle(&mut self.cpu.area, next);
        next
    }

    fn write(&mut self, index: u32, value: u64) -> Next {
        *self.cpu.register(0) = value & 0xFFFF_FFFF;
        *self.cpu.register(RDX) = value >> 32;
        *self.cpu.register(RCX) = u64::from(index);
        self.cpu.area.control.exit_info1 = 1;
        self.exit(exit_code::MSR)
    }

    fn read(&mut self, index: u32) -> u64 {
        *self.cpu.register(RCX) = u64::from(index);
        self.cpu.area.control.exit_info1 = 0;
        assert_eq!(self.exit(exit_code::MSR), Next::Run);
        *self.cpu.register(0) | *self.cpu.register(RDX) << 32
    }

    fn run(&mut self, block: u64) -> Next {
        *self.cpu.register(0) = block;
        self.exit(exit_code::VMRUN)
    }

    /// Does the work of the world switch after a guest's exit.
    fn guest_exits(&mut self) {
        let Area { own, control, .. } = &mut *self.cpu.area;
        (own.enter_guest, own.gif_is_clear) = (0, 1);
        control.virtual_interrupt |= VIRTUAL_MASKING;
        control.intercept_misc1 |= INTERCEPT_NMI;
        control.intercept_misc2 |= INTERCEPT_STGI;
    }
}

#[test]
fn kvm_reads_what_it_wrote_and_the_processor_has_ours() {
    let mut host = Host::new();
    assert_eq!(host.read(msr::EFER), LINUX_EFER, "SVM is free");
    assert_eq!(host.cpu.area.control.intercept_misc2, INTERCEPT_MISC2);
    let mut host = Host::with_svm();
    assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME);
    assert_eq!(host.read(msr::VM_HSAVE_PA), KVMS_PAGE);
    assert_eq!(host.cpu.hardware.msrs[&msr::VM_HSAVE_PA], 0x7000, "the hypervisor's");
    assert_eq!(host.cpu.area.control.intercept_misc2, INTERCEPT_MISC2_SHARED);
    assert_eq!(host.cpu.area.control.intercept_misc1, INTERCEPT_MISC1 & !INTERCEPT_INVLPGA);
    assert_eq!(host.cpu.area.own.quick_guests, 1);
    // The last virtual machine has gone: no wish to detach.
    assert_eq!(host.write(msr::VM_HSAVE_PA, 0), Next::Run);
    assert_eq!(host.write(msr::EFER, LINUX_EFER), Next::Run);
    assert_eq!(host.cpu.area.control.efer, LINUX_EFER | msr::EFER_SVME, "the hypervisor's");
    assert_eq!(host.cpu.area.control.intercept_misc2, INTERCEPT_MISC2);
    assert_eq!(host.cpu.area.control.intercept_misc1, INTERCEPT_MISC1);
    assert_eq!(host.cpu.area.own.quick_guests, 0);
}

#[test]
fn without_kvm_svm_shows_as_in_use_and_to_clear_it_is_to_leave() {
    let mut host = Host::new();
    host.allow(0);
    assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME);
    // A write of what was read turns nothing on.
    assert_eq!(host.write(msr::EFER, LINUX_EFER | msr::EFER_SVME), Next::Run);
    assert!(!has_svm(&host.cpu.area));
    assert_eq!(host.write(msr::EFER, LINUX_EFER), Next::Leave);
}

#[test]
fn a_kernel_that_crashes_beside_kvm_leaves_with_svm_on() {
    let mut host = Host::with_svm();
    host.allow(0);
    assert_eq!(host.write(msr::VM_HSAVE_PA, 0), Next::Leave);
    assert_eq!(host.cpu.area.cpu.gate.outward.svm, KEEP_SVME);
    assert_eq!(host.cpu.hardware.msrs[&msr::VM_HSAVE_PA], KVMS_PAGE);
}

#[test]
fn only_the_driver_learns_that_the_cpu_is_attached() {
    use crate::quick::Quick;
    use crate::svm::quick::answer;
    const ATTACHED: u64 = mercury_abi::gate::EFER_ATTACHED;
    let mut host = Host::with_svm();
    assert_eq!(host.read(msr::EFER) & ATTACHED, 0);
    *host.cpu.register(RCX) = u64::from(msr::EFER);
    let (area, hardware) = (&mut host.cpu.area, &mut host.cpu.hardware);
    (area.control.exit_code, area.control.exit_info1) = (exit_code::MSR, 0);
    assert_eq!(answer(area, hardware), Quick::Slow, "anybody");
    area.cpu.gate.outward.registers[RSI] = mercury_abi::gate::HYPERCALL_MAGIC;
    area.control.cpl = 3;
    assert_eq!(answer(area, hardware), Quick::Slow, "user mode");
    area.control.cpl = 0;
    let rip = area.control.rip;
    assert_eq!(answer(area, hardware), Quick::Run);
    assert_eq!(area.control.rip, rip + 2);
    let told = *host.cpu.register(0) | *host.cpu.register(RDX) << 32;
    assert_eq!(told, LINUX_EFER | msr::EFER_SVME | ATTACHED);
}

#[test]
fn the_driver_gets_the_mode_on_the_long_way_as_well() {
    const ATTACHED: u64 = mercury_abi::gate::EFER_ATTACHED;
    let mut host = Host::new();
    host.allow(0);
    host.cpu.area.cpu.on_snapshot = 1;
    assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME);
    *host.cpu.register(RSI) = mercury_abi::gate::HYPERCALL_MAGIC;
    assert_eq!(host.read(msr::EFER), LINUX_EFER | msr::EFER_SVME | ATTACHED);
}

#[test]
fn a_guest_is_entered_on_its_own_block() {
    let mut host = Host::with_svm();
    let rip = host.cpu.area.control.rip;
    assert_eq!(host.run(BLOCK), Next::Run);
    assert_eq!((host.cpu.area.own.enter_guest, host.cpu.area.own.block_phys), (1, BLOCK));
    assert_eq!(*host.entry & 0x000F_FFFF_FFFF_F003, BLOCK | 3, "present");
    assert_eq!((host.cpu.area.control.rip, host.cpu.area.control.rax), (rip + 3, BLOCK));
    assert_eq!(host.cpu.area.shared().exits[ExitReason::GuestRun as usize], 1);
    assert_eq!(host.cpu.area.control.tlb_control, 0);
}

#[test]
fn an_invalid_block_address_faults() {
    let mut host = Host::with_svm();
    for address in [BLOCK + 8, nested::tests::BEYOND, nested::tests::HIDDEN.as_u64()] {
        let rip = host.cpu.area.control.rip;
        assert_eq!(host.run(address), Next::Run);
        assert_eq!(host.cpu.area.control.inject_event, event::GENERAL_PROTECTION, "{address:#x}");
        assert_eq!((host.cpu.area.control.rip, host.cpu.area.own.enter_guest), (rip, 0));
        assert_eq!(*host.entry, 0);
        host.cpu.enter();
    }
}

#[test]
fn without_svm_its_instructions_are_undefined() {
    for code in [exit_code::VMRUN, exit_code::STGI, exit_code::CLGI] {
        let mut host = Host::new();
        *host.cpu.register(0) = BLOCK;
        assert_eq!(host.exit(code), Next::Run);
        assert_eq!(host.cpu.area.control.inject_event, event::INVALID_OPCODE);
    }
}

#[test]
fn the_system_and_its_guest_never_share_an_identifier() {
    let mut host = Host::with_svm();
    for asid in [15, 14, 15] {
        host.block.asid = asid;
        assert_eq!(host.run(BLOCK), Next::Run);
        assert_eq!(host.cpu.area.control.asid, 29 - asid);
        assert_eq!(host.cpu.area.control.tlb_control, TLB_FLUSH_ALL);
    }
    // Two identifiers in all: one for each, if they do not want the same one.
    let mut host = Host::with_svm();
    (host.cpu.area.own.asids, host.cpu.area.control.asid, host.block.asid) = ([1, 0], 1, 1);
    assert_eq!(host.run(BLOCK), Next::Leave);
}

#[test]
fn an_encrypted_guest_and_one_with_avic_run_natively() {
    runs_natively(|block| block.nested_control = 3);
    runs_natively(|block| block.virtual_interrupt = VIRTUAL_APIC);
}

fn runs_natively(make: fn(&mut Vmcb)) {
    let mut host = Host::with_svm();
    make(&mut host.block);
    let rip = host.cpu.area.control.rip;
    assert_eq!(host.run(BLOCK), Next::Leave);
    let outward = &host.cpu.area.cpu.gate.outward;
    assert_eq!((outward.rip, outward.registers[0]), (rip, BLOCK), "VMRUN is executed again");
    assert_eq!(outward.svm, KEEP_SVME | KEEP_GIF_CLEAR);
    assert_eq!(host.cpu.area.shared().left_because, Code::GuestUnsupported as u64);
}

#[test]
fn vmrun_needs_kvms_values_in_the_processor() {
    let as_natively = |host: &mut Host| is_as_natively(&host.cpu.area, &mut host.cpu.hardware);
    let differ: [fn(&mut Host); 4] = [
        |host| host.cpu.area.own.guest_efer &= !efer::NXE,
        |host| host.cpu.area.control.cr4 |= cr4::LA57,
        |host| host.cpu.area.control.g_pat ^= 1 << 8,
        |host| {
            host.cpu.area.own.around_guest |= LENT;
            host.cpu.hardware.msrs.insert(msr::SPEC_CTRL, 1);
        },
    ];
    for (number, differ) in differ.into_iter().enumerate() {
        let mut host = Host::with_svm();
        assert!(as_natively(&mut host));
        differ(&mut host);
        assert!(!as_natively(&mut host), "{number}");
    }
    // The processor has any value that the system sets, while the CPU stays attached.
    let mut host = Host::with_svm();
    assert_eq!(host.write(msr::PAT, crate::model::LINUX_PAT ^ 1 << 24), Next::Run);
    assert_eq!(host.write(msr::EFER, LINUX_EFER | msr::EFER_SVME | efer::AUTOIBRS), Next::Run);
    assert!(as_natively(&mut host));
    assert_eq!(host.run(BLOCK), Next::Run);
    assert_eq!(host.write(msr::EFER, LINUX_EFER & !efer::NXE | msr::EFER_SVME), Next::Leave);
}

#[test]
fn an_nmi_waits_for_stgi() {
    let mut host = Host::with_svm();
    assert_eq!(host.run(BLOCK), Next::Run);
    host.guest_exits();
    assert_eq!(host.exit(exit_code::NMI), Next::Run);
    assert_eq!((host.cpu.hardware.nmis_taken, host.cpu.area.control.inject_event), (1, 0));
    assert_eq!(host.exit(exit_code::STGI), Next::Run);
    let control = &host.cpu.area.control;
    assert_eq!(control.inject_event, NMI);
    assert_eq!(control.virtual_interrupt, 0);
    assert_eq!(control.intercept_misc1 & INTERCEPT_NMI, 0);
    assert_eq!(control.intercept_misc2, INTERCEPT_MISC2_SHARED);
    // The next one finds nothing.
    host.cpu.enter();
    host.guest_exits();
    assert_eq!(host.exit(exit_code::STGI), Next::Run);
    assert_eq!(host.cpu.area.control.inject_event, 0);
}

#[test]
fn while_a_snapshot_is_kept_nmis_go_on_to_exit() {
    let mut host = Host::with_svm();
    host.cpu.area.control.intercept_misc1 |= INTERCEPT_NMI | INTERCEPT_SHUTDOWN;
    host.guest_exits();
    assert_eq!(host.exit(exit_code::STGI), Next::Run);
    assert_ne!(host.cpu.area.control.intercept_misc1 & INTERCEPT_NMI, 0);
}

#[test]
fn a_detach_beneath_kvm_leaves_it_everything() {
    let mut host = Host::with_svm();
    *host.cpu.register(0) = mercury_abi::gate::Hypercall::Detach as u64;
    *host.cpu.register(RCX) = mercury_abi::gate::HYPERCALL_MAGIC;
    let (rip, rflags) = (host.cpu.area.control.rip, host.cpu.area.control.rflags);
    let root = host.cpu.area.control.nested_cr3;
    assert_eq!(host.exit(exit_code::VMMCALL), Next::Leave);
    assert_eq!(host.cpu.area.control.nested_cr3, root);
    assert_eq!(host.cpu.area.control.exit_code, exit_code::VMMCALL, "not the flush's own");
    let outward = &host.cpu.area.cpu.gate.outward;
    assert_eq!((outward.svm, outward.rip, outward.rflags), (KEEP_SVME, rip + 3, rflags));
    assert_eq!(host.cpu.hardware.msrs[&msr::VM_HSAVE_PA], KVMS_PAGE);
    assert_eq!(host.cpu.hardware.flushes, 1, "the system's own identifier may be a guest's next");
    assert_eq!(host.cpu.area.control.intercept_misc1 & INTERCEPT_ALL_EVENTS, 0);
}

/// KVM as the manual has it, and who must see its GIF.
#[derive(Default)]
struct Manual {
    svm: bool,
    gif_is_clear: bool,
    /// CLGI exited, or a guest did.
    is_seen: bool,
    held: bool,
    snapshot: bool,
}

impl Host {
    /// Does the next step of KVM or of the rest of the system, if that can be done now.
    fn step(&mut self, manual: &mut Manual, step: u8) {
        match step {
            0 if !manual.gif_is_clear => {
                self.write(msr::EFER, LINUX_EFER | msr::EFER_SVME);
                manual.svm = true;
            }
            1 if !manual.gif_is_clear => {
                self.write(msr::EFER, LINUX_EFER);
                manual.svm = false;
            }
            2 if manual.svm => {
                self.block.inject_event = event::VALID | 0x30;
                self.run(BLOCK);
                assert_eq!(self.cpu.area.own.enter_guest == 0, manual.held);
                if manual.held {
                    let block = &self.block;
                    assert_eq!((block.exit_code, block.exit_event), (exit_code::NMI, event::VALID | 0x30));
                    assert_eq!(block.inject_event, 0);
                } else {
                    self.guest_exits();
                }
                (manual.gif_is_clear, manual.is_seen) = (true, true);
            }
            3 if manual.svm => {
                if self.cpu.area.control.intercept_misc2 & INTERCEPT_STGI != 0 {
                    self.exit(exit_code::STGI);
                    assert_eq!(self.cpu.area.control.inject_event == NMI, manual.held);
                }
                (manual.gif_is_clear, manual.held) = (false, false);
            }
            4 if manual.gif_is_clear && manual.is_seen => {
                let taken = self.cpu.hardware.nmis_taken;
                self.exit(exit_code::NMI);
                assert_eq!(self.cpu.hardware.nmis_taken, taken + 1);
                manual.held = true;
            }
            5 if manual.svm => {
                let exits = self.cpu.area.control.intercept_misc2 & INTERCEPT_CLGI != 0;
                if exits {
                    self.exit(exit_code::CLGI);
                    assert_eq!(self.cpu.area.control.inject_event, 0);
                }
                manual.is_seen = exits || manual.gif_is_clear && manual.is_seen;
                manual.gif_is_clear = true;
            }
            // The first write to a page: without a snapshot KVM makes none where CLGI is not seen.
            6 if manual.snapshot || !manual.gif_is_clear => {
                (self.cpu.area.control.exit_info1, self.cpu.area.control.exit_info2) =
                    (NPF_WRITE, nested::tests::UNTOUCHED);
                assert_eq!(self.exit(exit_code::NPF), Next::Run);
            }
            // By an interrupt, which waits for GIF.
            7 | 8 if !manual.gif_is_clear => {
                self.cpu.area.cpu.on_snapshot = if step == 7 { live::ON_SNAPSHOT } else { 0 };
                manual.snapshot = step == 7;
                *self.cpu.register(0) = mercury_abi::gate::Hypercall::Ping as u64;
                *self.cpu.register(RCX) = mercury_abi::gate::HYPERCALL_MAGIC;
                self.exit(exit_code::VMMCALL);
            }
            _ if !manual.gif_is_clear => {
                assert_eq!(self.read(msr::EFER) & msr::EFER_SVME != 0, manual.svm);
            }
            _ => {}
        }
        self.cpu.enter();
    }

    /// Compares with the manual. An entry of the system sets GIF, but no event reaches it, whatever has
    /// exited since CLGI.
    fn agrees(&self, manual: &Manual) {
        let control = &self.cpu.area.control;
        let held_back = manual.gif_is_clear && manual.is_seen;
        assert_eq!(control.virtual_interrupt & VIRTUAL_MASKING != 0, held_back);
        assert_eq!(control.intercept_misc1 & INTERCEPT_NMI != 0, held_back);
        assert_eq!(control.intercept_misc2 & INTERCEPT_STGI != 0, !manual.svm || held_back);
        assert!(!manual.snapshot || held_back || !manual.gif_is_clear, "an exit would open it");
        let beneath = INTERCEPT_CLGI | INTERCEPT_VMSAVE;
        let wanted = if !manual.svm || manual.snapshot { beneath } else { 0 };
        assert_eq!(control.intercept_misc2 & beneath, wanted);
        assert_eq!(control.intercept_misc2 & INTERCEPT_VMLOAD != 0, !manual.svm);
        assert_eq!(control.intercept_misc2 & INTERCEPT_MISC2_SHARED, INTERCEPT_MISC2_SHARED);
        assert_eq!(control.intercept_misc1 & INTERCEPT_INVLPGA != 0, !manual.svm);
        assert!(control.efer & msr::EFER_SVME != 0);
        let quick = manual.svm && !manual.snapshot;
        assert_eq!(self.cpu.area.own.quick_guests != 0, quick, "the world switch answers nothing by itself");
        // State that a native KVM would go on with, if the CPU left here.
        let kept = keep(self.cpu.area.own.guest_efer, self.cpu.area.own.gif_is_clear != 0);
        assert_eq!(kept == KEEP_SVME | KEEP_GIF_CLEAR, manual.svm && held_back);
    }
}

const NPF_WRITE: u64 = 1 << 1;
const INTERCEPT_VMLOAD: u32 = 1 << 2;

/// KVM loads its guest's FS, GS and TR between CLGI and VMRUN, and meets pages there that were not
/// written since the instant. No event may strike then.
#[test]
fn beneath_a_snapshot_gif_stays_0_from_clgi_to_vmrun() {
    let mut host = Host::with_svm();
    let mut manual = Manual { svm: true, ..Manual::default() };
    for (step, held_back) in [(7, false), (5, true), (6, true), (4, true), (6, true), (2, true), (3, false)] {
        host.step(&mut manual, step);
        host.agrees(&manual);
        assert_eq!(host.cpu.area.control.virtual_interrupt & VIRTUAL_MASKING != 0, held_back, "{step}");
    }
    assert_eq!(host.cpu.area.own.nmi_held, 0);
}

#[test]
fn an_immediate_exit_keeps_kvms_flush_request() {
    let mut host = Host::with_svm();
    host.cpu.area.cpu.on_snapshot = live::ON_SNAPSHOT;
    for (wanted, flushed) in [(TLB_KEEP, TLB_KEEP), (3, TLB_FLUSH_ALL)] {
        host.cpu.area.control.tlb_control = TLB_KEEP;
        host.block.tlb_control = wanted;
        assert_eq!(host.exit(exit_code::CLGI), Next::Run);
        assert_eq!(host.exit(exit_code::NMI), Next::Run);
        assert_eq!(host.run(BLOCK), Next::Run);
        assert_eq!((host.block.exit_code, host.cpu.area.own.enter_guest), (exit_code::NMI, 0));
        assert_eq!(host.cpu.area.control.tlb_control, flushed);
        assert_eq!(host.exit(exit_code::STGI), Next::Run);
        assert_eq!(host.cpu.enter(), NMI);
    }
}

/// A collection of the log, or a snapshot, has this CPU forget translations: what a shadow lets through
/// goes with them.
#[test]
fn a_shadow_expires_with_translations() {
    const RDI: usize = 7;
    let mut host = Host::with_svm();
    host.cpu.area.cpu.on_snapshot = live::ON_LOG;
    *host.cpu.register(0) = mercury_abi::gate::Hypercall::Snapshot as u64;
    *host.cpu.register(RCX) = mercury_abi::gate::HYPERCALL_MAGIC;
    *host.cpu.register(RDI) = mercury_abi::snapshot::SnapshotCall::Leave as u64;
    let mut expired = shadow::Shadow::default();
    expired.expire();
    assert_ne!(host.cpu.area.own.shadow, expired);
    assert_eq!(host.cpu.exit(exit_code::VMMCALL), Next::Run);
    assert_eq!((host.cpu.area.own.shadow, host.cpu.area.control.tlb_control), (expired, TLB_FLUSH_ALL));
}

/// A rollback that fails leaves the NMI that was to fetch this CPU; it is no better than another.
#[test]
fn an_unsolicited_nmi_waits_for_stgi() {
    let mut host = Host::with_svm();
    host.cpu.area.cpu.on_snapshot = live::ON_SNAPSHOT;
    host.cpu.area.control.intercept_misc1 |= INTERCEPT_NMI | INTERCEPT_SHUTDOWN;
    host.cpu.area.own.quick_guests = 0;
    assert_eq!(host.exit(exit_code::CLGI), Next::Run);
    assert_eq!(host.exit(exit_code::NMI), Next::Run);
    assert_eq!(host.cpu.area.control.intercept_misc1 & INTERCEPT_NMI, INTERCEPT_NMI);
    assert_eq!((host.cpu.area.own.nmi_held, host.cpu.hardware.nmis_taken), (1, 1));
}

proptest! {
    /// Intercepts, permission maps, what is to be injected and when, windows for interrupts and NMIs, what
    /// is to be flushed, the guest's registers: the processor has them as KVM has made them.
    #[test]
    fn a_block_is_entered_as_kvm_has_made_it(
        words in prop::collection::vec(any::<u64>(), size_of::<Vmcb>() / 8),
    ) {
        let mut host = Host::with_svm();
        let bytes = |block: &Vmcb| -> Vec<u64> {
            // SAFETY: a block is made of integers, without gaps.
            unsafe { core::slice::from_raw_parts(core::ptr::from_ref(block).cast(), words.len()) }.to_vec()
        };
        // SAFETY: likewise; any bits are a value.
        unsafe { core::ptr::copy_nonoverlapping(words.as_ptr(), (&raw mut *host.block).cast(), words.len()) };
        host.block.asid = 3;
        host.block.nested_control &= !u64::from(NESTED_CONTROL_ENCRYPTED);
        host.block.virtual_interrupt &= !VIRTUAL_APIC;
        // The processor reads a block anew: another one may have been here.
        let mut wanted = bytes(&host.block);
        wanted[core::mem::offset_of!(Vmcb, clean) / 8] = 0;
        prop_assert_eq!(host.run(BLOCK), Next::Run);
        prop_assert_eq!(host.cpu.area.own.enter_guest, 1);
        prop_assert_eq!(bytes(&host.block), wanted);
    }

    /// Whatever KVM and the rest of the system do: what the processor is told is what they would have
    /// natively.
    #[test]
    fn gif_and_intercepts_agree(steps in prop::collection::vec(0..10u8, 1..40)) {
        let mut host = Host::new();
        let mut manual = Manual::default();
        for step in steps {
            host.step(&mut manual, step);
            host.agrees(&manual);
        }
    }
}
