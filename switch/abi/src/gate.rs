//! The interface of driver and hypervisor inside the kernel: the memory that the driver gives at
//! load, the per-CPU area with the gate's block, native operations, hypercalls and fault points.
//!
//! The hypervisor lives at the *direct-map address* of its own memory. Every `_virt` address here
//! is therefore the same in the kernel's address space and in the hypervisor's.
//!
//! # The gate
//!
//! The gate is a page of the driver's text. The hypervisor's tables map the page at the same
//! address. The gate has a way in and a way out:
//!
//! - **in** (`mercury_svm_enter(area)`, C calling convention, interrupts off, EFER.SVME set by the
//!   caller): saves the callee-saved registers and RFLAGS on the stack; CLGI; stores RSP, the
//!   address of its return label, RFLAGS, CR3 and CR4 in [`GateBlock::inward`]; loads
//!   [`GateBlock::host_cr4`] and [`GateBlock::host_cr3`]; jumps to [`GateBlock::entry_virt`] with
//!   RDI = address of the area.
//! - **out** (the hypervisor jumps to [`GateBlock::leave_virt`] with RDI = address of the area):
//!   loads [`GateBlock::outward`] into the processor, STGI, clears EFER.SVME, and continues at the
//!   outward CS:RIP with the outward registers. Where KVM uses SVM, [`Outward::svm`] suppresses the
//!   STGI or the clearing.
//!
//! AMD's gate works so. Intel's processors have no GIF: see [`NmiBlock`]. There CR4.VMXE takes the
//! place of EFER.SVME: the driver sets and clears it, and the hypervisor executes VMXON and VMXOFF.
//!
//! A native operation that ends without entering the guest leaves the same way, to the return
//! label, with its result in RAX. A successful attach returns to the same label as the guest, RAX =
//! 0.

use crate::facts::TableRegister;
use crate::shared::Registers;

/// Pages of one CPU's area. They are physically and virtually contiguous, and aligned to the area's
/// size.
pub const AREA_PAGES: usize = 8;
/// Size of one CPU's area in bytes.
pub const AREA_SIZE: usize = AREA_PAGES * 4096;
/// Index of the page that holds the vendor's control block (VMCB: APM volume 2, appendix B; VMCS:
/// SDM volume 3, "Virtual-Machine Control Structures").
pub const AREA_PAGE_CONTROL: usize = 1;
/// Index of the page that holds the hypervisor's own extended state: a VMCB for VMLOAD (AMD).
pub const AREA_PAGE_HOST: usize = 2;
/// Index of the page that only the processor uses: the host save area (VM_HSAVE_PA, AMD) or the
/// VMXON region (Intel). The hypervisor's tables do not map the page, so that an overflow of the
/// stack faults there.
pub const AREA_PAGE_PROCESSOR: usize = 4;
/// Index of the stack's first page. The stack ends at the end of the area.
pub const AREA_PAGE_STACK: usize = 5;

/// A vendor of hardware virtualization. The driver chooses the hypervisor's entry point by the
/// vendor; no other path of a switch depends on it.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD's processors, with SVM.
    Amd = 0,
    /// Intel's processors, with VMX.
    Intel = 1,
}

/// Number of [`Vendor`]s: entries of arrays by vendor.
pub const VENDORS: usize = 2;

/// "MERCHYPR" in ASCII, little-endian: the first word of the hypervisor's flat image.
pub const IMAGE_MAGIC: u64 = 0x5250_5948_4352_454d;

/// Header of the hypervisor's flat image. Offsets are in bytes from the image's start. Text,
/// read-only data and data each start at a page boundary.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    /// [`IMAGE_MAGIC`]; the driver refuses another value.
    pub magic: u64,
    /// [`crate::MERCURY_ABI_VERSION`] of the hypervisor's build.
    pub abi_version: u32,
    /// 1 if the image was built with fault points, else 0.
    pub fault_injection: u32,
    /// Offset of the end of text (readable and executable). Text starts at 0, with this header.
    pub text_end: u64,
    /// Offset of the end of read-only data, which starts at `text_end`.
    pub rodata_end: u64,
    /// Offset of the end of initialised data in the file.
    pub file_end: u64,
    /// Offset of the end of the image in memory, zero-filled data included.
    pub memory_end: u64,
    /// Offset of the table of relocations (ELF64 Rela). Only R_X86_64_RELATIVE occurs.
    pub rela_offset: u64,
    /// Size of the table of relocations in bytes.
    pub rela_size: u64,
    /// Offsets of the native entry points, by [`Vendor`]; 0 if the image has no code for that
    /// vendor.
    pub entry_offsets: [u64; VENDORS],
    /// The hypervisor's version, NUL-padded ASCII.
    pub version: [u8; 32],
}

/// A physically contiguous range of the hypervisor's memory. Its own tables map the range; the
/// nested tables hide it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnedRange {
    /// Host-physical address of the first byte, page-aligned.
    pub start_phys: u64,
    /// Length in pages of 4 KiB.
    pub pages: u64,
}

/// Argument of [`NativeOp::Init`]: everything that stays the same until unload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BootInfo {
    /// [`crate::MERCURY_ABI_VERSION`] of the driver's build.
    pub abi_version: u32,
    /// 1 if the kernel runs with five-level paging (CR4.LA57), else 0.
    pub five_level: u32,
    /// Kernel virtual address of physical address 0: the base of the direct map.
    pub direct_map_virt: u64,
    /// Kernel virtual address of the image's first byte.
    pub image_virt: u64,
    /// Kernel virtual address of an array of [`OwnedRange`]: all memory that the nested tables
    /// hide.
    pub owned_virt: u64,
    /// Number of entries at `owned_virt`.
    pub owned_count: u64,
    /// Kernel virtual address of an array of host-physical addresses: zeroed pages for nested
    /// tables, inside owned ranges. The driver may extend the array between two calls of
    /// [`NativeOp::Build`].
    pub pool_virt: u64,
    /// Number of entries at `pool_virt`.
    pub pool_count: u64,
    /// Host-physical address behind the last byte that RAM or a device occupies.
    /// [`NativeOp::Build`] maps all memory below.
    pub iomem_end_phys: u64,
}

/// A segment register with its hidden part, as the driver reads it from the live descriptor tables. The
/// layout is that of AMD's control block (APM volume 2, appendix B, "VMCB state save area").
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Selector, as software loads it.
    pub selector: u16,
    /// Access rights as the vendor's control block holds them: type, S, DPL, P in bits 7:0; AVL, L,
    /// D/B, G in bits 11:8 on AMD, in bits 15:12 on Intel. Zero for a null selector.
    pub attributes: u16,
    /// Limit in bytes, as LSL returns it.
    pub limit: u32,
    /// Base address, virtual.
    pub base: u64,
}

/// State of the CPU at the entry of the gate: values that the driver and the gate's way in store
/// for the hypervisor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inward {
    /// RSP at the return label: kernel virtual.
    pub rsp: u64,
    /// Kernel virtual address of the return label.
    pub rip: u64,
    /// RFLAGS at the return label.
    pub rflags: u64,
    /// CR3 of the system: host-physical root and flags.
    pub cr3: u64,
    /// CR4 of the system at the gate's entry.
    pub cr4: u64,
    /// EFER as it was before the driver set SVME for the gate (AMD).
    pub efer: u64,
    /// VM_HSAVE_PA as it was before; a detach restores it (AMD). Host-physical.
    pub vm_hsave_pa: u64,
    /// CS of the system. Filled by the driver.
    pub cs: Segment,
    /// SS of the system. Filled by the driver.
    pub ss: Segment,
    /// DS of the system. Filled by the driver.
    pub ds: Segment,
    /// ES of the system. Filled by the driver.
    pub es: Segment,
    /// FS, without its base. Filled by the driver on Intel.
    pub fs: Segment,
    /// GS, without its base. Filled by the driver on Intel.
    pub gs: Segment,
    /// LDTR, without its base. Filled by the driver on Intel.
    pub ldtr: Segment,
    /// TR, without its base. Filled by the driver on Intel.
    pub tr: Segment,
    /// Base of LDTR, kernel virtual; 0 for a null selector.
    pub ldtr_base_virt: u64,
    /// Base of TR, kernel virtual: the task-state segment.
    pub tr_base_virt: u64,
    /// GDTR of the system. Filled by the gate on Intel; on AMD the hypervisor reads it itself.
    pub gdtr: DescriptorTable,
    /// IDTR of the system, filled as `gdtr` is.
    pub idtr: DescriptorTable,
}

/// State of the CPU after the gate's way out: values that the way out loads into the processor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outward {
    /// CR0 of the system.
    pub cr0: u64,
    /// CR2 of the system: linear address of its last page fault.
    pub cr2: u64,
    /// CR3 of the system: host-physical root and flags.
    pub cr3: u64,
    /// CR4 of the system.
    pub cr4: u64,
    /// DR6 of the system: status of debug exceptions.
    pub dr6: u64,
    /// DR7 of the system: armed breakpoints.
    pub dr7: u64,
    /// GDTR of the system, as LGDT reads it from memory: the limit in the two bytes before the
    /// address.
    pub gdtr: DescriptorTable,
    /// IDTR of the system, as LIDT reads it from memory.
    pub idtr: DescriptorTable,
    /// IA32_DEBUGCTL where only the gate can load it: with branches stored through the page tables
    /// in use (Intel). 0 if the gate need not.
    pub debugctl: u64,
    /// Selectors ES, CS, SS and DS, in this order.
    pub selectors: [u64; 4],
    /// Virtual address at which the system goes on.
    pub rip: u64,
    /// RFLAGS with which the system goes on.
    pub rflags: u64,
    /// General registers of the system; entry 4 is RSP.
    pub registers: Registers,
    /// Selectors FS and GS (Intel). On AMD the hypervisor loads them before the gate.
    pub thread_selectors: [u64; 2],
    /// Bases of FS and GS, virtual (Intel).
    pub thread_bases: [u64; 2],
    /// EFER where only the gate can load it: without NXE, which the hypervisor's tables need
    /// (Intel). 0 if the gate need not.
    pub efer: u64,
    /// Bits of SVM that the gate leaves alone (AMD): [`KEEP_SVME`], [`KEEP_GIF_CLEAR`].
    pub svm: u64,
}

/// Bit of [`Outward::svm`]: EFER.SVME stays set, because KVM has set it.
pub const KEEP_SVME: u64 = 1 << 0;
/// Bit of [`Outward::svm`]: GIF stays 0, because KVM has cleared it.
pub const KEEP_GIF_CLEAR: u64 = 1 << 1;

/// A pseudo-descriptor in memory. LGDT and LIDT get the address of `limit`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescriptorTable {
    /// Zeros, which align `base_virt` to 8 bytes.
    pub padding: [u16; 3],
    /// Size of the table in bytes less one.
    pub limit: u16,
    /// Linear address of the table: kernel virtual.
    pub base_virt: u64,
}

impl DescriptorTable {
    /// Returns the pseudo-descriptor of a table register.
    #[must_use]
    pub const fn new(register: TableRegister) -> Self {
        Self { padding: [0; 3], limit: register.limit as u16, base_virt: register.base_virt }
    }
}

/// The first bytes of a CPU's area. The hypervisor's private per-CPU data follows at
/// [`GATE_PRIVATE_OFFSET`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateBlock {
    /// CR3 of the hypervisor's tables: a host-physical address. Filled at load.
    pub host_cr3: u64,
    /// CR4 while the hypervisor runs. Only PAE, MCE, OSFXSR and OSXMMEXCPT are set, LA57 if the
    /// kernel has it, and VMXE on Intel. Filled at load.
    pub host_cr4: u64,
    /// Host-virtual address of the native entry point. Filled at load.
    pub entry_virt: u64,
    /// Virtual address of the gate's way out. Filled at load.
    pub leave_virt: u64,
    /// Host-physical address of this area. Filled at load.
    pub area_phys: u64,
    /// Virtual address of this CPU's [`crate::shared::SharedCpu`]. Filled at load.
    pub shared_virt: u64,
    /// Host-virtual address of the page through which the hypervisor reads a guest's control block
    /// of KVM. Filled at load.
    pub window_virt: u64,
    /// Host-virtual address of the page-table entry that maps that page. Filled at load.
    pub window_entry_virt: u64,
    /// Linux's number of this CPU. Filled at load.
    pub cpu: u32,
    /// [`NativeOp`] to execute. Filled by the driver before each call.
    pub operation: u32,
    /// Argument of the operation: a kernel virtual address, or 0.
    pub argument: u64,
    /// Out: the two values to which the result code's explanation refers.
    pub detail: [u64; 2],
    /// Armed fault point of this CPU (fault-injection builds).
    pub fault: FaultArm,
    /// Number of fault points that have fired on this CPU since load (fault-injection builds).
    pub fault_fired: u64,
    /// State that the way in leaves for the hypervisor.
    pub inward: Inward,
    /// State that the way out loads.
    pub outward: Outward,
    /// Space for the gate alone: RIP, CS, RFLAGS, RSP and SS for the IRETQ of a way out to user
    /// mode.
    pub frame: [u64; 5],
    /// 1 if a machine check struck in the hypervisor and the system has not received it yet; else
    /// 0. The gate raises the machine check on the way out.
    pub machine_check: u64,
    /// Delivery of NMIs where the processor cannot hold them back (Intel).
    pub nmi: NmiBlock,
}

/// Delivery of NMIs on a processor without a global interrupt flag.
///
/// An NMI may strike between the gate's first instruction and its last, or in the hypervisor. The
/// processor then calls the driver's handler in the gate page ([`NmiBlock::handler_virt`]), on
/// whatever stack of the area is in use. The handler counts the NMI in [`NmiBlock::pending`] and
/// returns without IRET, so that further NMIs stay blocked, as they would be in the system's own
/// handler. A second NMI waits in the processor. The next entry into the guest injects the first;
/// the gate's way out raises it with INT 2 after the system's tables are loaded.
///
/// The last read of `pending` and the entry are a window: `window_start_virt` up to
/// `window_end_virt`. If an NMI strikes in the window, the handler returns to `restart_virt`, where
/// the hypervisor reads `pending` again.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NmiBlock {
    /// Number of NMIs that the system has yet to receive.
    pub pending: u64,
    /// Virtual address of the handler; 0 on a processor that needs none. Filled at load.
    pub handler_virt: u64,
    /// Host-virtual address of the window's first instruction. Filled by the hypervisor.
    pub window_start_virt: u64,
    /// Host-virtual address behind the window's last instruction.
    pub window_end_virt: u64,
    /// Host-virtual address of the code that reads `pending` again.
    pub restart_virt: u64,
    /// GDT while the gate or the hypervisor runs: null, unused, then code and data at the kernel's
    /// selectors. Filled at load.
    pub gdt: [u64; 4],
    /// IDT while the gate or the hypervisor runs: vectors 0 to 2, of which only NMI is present.
    /// Filled at load.
    pub idt: [u64; 6],
    /// Pseudo-descriptor of `gdt`. Filled at load.
    pub gdtr: DescriptorTable,
    /// Pseudo-descriptor of `idt`. Filled at load.
    pub idtr: DescriptorTable,
}

/// Offset in bytes of the hypervisor's private data in the gate page.
pub const GATE_PRIVATE_OFFSET: usize = 1024;

const _: () = assert!(size_of::<GateBlock>() <= GATE_PRIVATE_OFFSET);
const _: () = assert!(AREA_SIZE.is_power_of_two());

/// Operations that the hypervisor executes on a native CPU, through the gate.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NativeOp {
    /// Stores the boot information; argument: address of a [`BootInfo`]. Once per load.
    Init = 1,
    /// Builds a bounded part of the nested tables. Returns `More`, `NeedPages` or `Ok`.
    Build = 2,
    /// Runs the preflight checks; argument: address of a [`crate::facts::CpuFacts`] inside mapped
    /// memory.
    Preflight = 3,
    /// Attaches this CPU. Returns to the caller as the guest.
    Attach = 4,
}

/// "MERC" in ASCII: RCX of every hypercall.
pub const HYPERCALL_MAGIC: u64 = 0x4352_454d;

/// Bit that RDMSR of EFER sets in its answer on an attached AMD CPU if RSI holds
/// [`HYPERCALL_MAGIC`]. With it the driver asks a CPU for its mode without an exception: bit 63 is
/// never set in the processor's own EFER.
pub const EFER_ATTACHED: u64 = 1 << 63;

/// Hypercalls of the driver. In: the number in RAX, [`HYPERCALL_MAGIC`] in RCX, arguments in RDI
/// and RSI. Out: the result code in RAX, a value in RDX. Other registers are preserved. The
/// instruction is #UD from user mode, with another RCX, or on a native CPU.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hypercall {
    /// Returns [`crate::MERCURY_ABI_VERSION`] in RDX: this CPU is attached.
    Ping = 0,
    /// Detaches this CPU. Returns to the caller natively.
    Detach = 1,
    /// Flushes this CPU's cached translations of the nested tables.
    Flush = 2,
    /// Arms fault point RDI on this CPU for passage RSI (fault-injection builds).
    ArmFault = 3,
    /// Executes the [`crate::snapshot::SnapshotCall`] in RDI, with an argument in RSI.
    Snapshot = 4,
    /// Executes the [`IntegrityCall`] in bits 63:56 of RDI, with a first argument in the other bits and
    /// a second one in RSI. AMD only.
    Integrity = 5,
}

/// Position of an [`IntegrityCall`] in RDI.
pub const MERCURY_INTEGRITY_SHIFT: u32 = 56;

/// Most ranges of code that [`IntegrityCall::Writer`] adds.
pub const MERCURY_INTEGRITY_WRITERS: usize = 4;

/// A request about pages of the system that are read-only in the nested tables. A store to one of
/// them is logged ([`crate::shared::LogKind::ForeignStore`]), and the page can be written from then on.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntegrityCall {
    /// Begins anew, without a change of pages. First: host-physical root of the page tables with which
    /// the kernel changes its own code. A store with these tables, and from the code of
    /// [`IntegrityCall::Writer`], is let through and not logged. Second: a number above
    /// [`crate::shared::READ_ONLY_LATER`], which CPUs publish while the pages are read-only beneath them
    /// ([`crate::shared::SharedCpu::read_only`]).
    Begin = 0,
    /// Adds code that may do so: first and second are its start and its end, virtual. The first is
    /// sign-extended. There is room for [`MERCURY_INTEGRITY_WRITERS`].
    Writer = 1,
    /// Makes pages read-only. First: the host-physical address; second: their number. They lie in one
    /// block of 2 MiB.
    Protect = 2,
    /// Runs this CPU, and all CPUs that are attached from here on, on the tables with these pages. No
    /// arguments.
    Enter = 3,
    /// Runs this CPU, and all CPUs that are attached from here on, without them. No arguments.
    Leave = 4,
}

/// A place where a test can inject a fault (fault-injection builds only). A point fires once per
/// arming.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPoint {
    /// No point: disarms all points.
    None = 0,

    // Driver
    /// In a load, the contiguous allocation fails.
    LoadContiguous = 1,
    /// In a load, a later allocation fails.
    LoadMemory = 2,
    /// In a load, the image's header is damaged.
    LoadImage = 3,
    /// In an attach, on all CPUs: the word of the facts at [`FaultArm::offset`] becomes
    /// [`FaultArm::value`].
    Facts = 4,
    /// In an attach, the CPU is refused just before EFER.SVME (Intel: CR4.VMXE) is set.
    BeforeSvme = 5,
    /// In an attach, the CPU is refused just after EFER.SVME (Intel: CR4.VMXE) is set.
    AfterSvme = 6,
    /// In an attach, the CPU reports the wrong mode after the switch.
    AfterSwitch = 7,
    /// In an attach, the hotplug callback refuses a CPU that comes online.
    Hotplug = 8,
    /// The driver is removed by force: it detaches no CPU.
    Exit = 9,

    // Hypervisor, on the way in
    /// The hypervisor refuses at its entry.
    Entry = 32,
    /// The hypervisor refuses after it has saved the extended state.
    AfterSave = 33,
    /// The hypervisor refuses after it has filled the control block.
    AfterCapture = 34,
    /// The hypervisor refuses just before it enters the guest.
    BeforeRun = 35,
    /// #PF in the hypervisor on the way in.
    EntryPageFault = 36,
    /// Panic in the hypervisor on the way in.
    EntryPanic = 37,
    /// The control block has address-space identifier (Intel: VPID) 0.
    RunAsidZero = 38,
    /// The control block lacks the VMRUN intercept (Intel: a pin-based control that must be 1).
    RunNoIntercept = 39,
    /// CR0 of the guest has bit 32 set.
    RunCr0 = 40,
    /// CR4 of the guest has a reserved bit set.
    RunCr4 = 41,
    /// EFER of the guest lacks SVME (Intel: LMA in long mode).
    RunEfer = 42,
    /// CR3 of the guest has a reserved bit set.
    RunCr3 = 43,
    /// DR7 of the guest has bit 32 set.
    RunDr7 = 44,
    /// A word of the control block is changed by an exclusive or with [`FaultArm::value`]. The low
    /// half of [`FaultArm::offset`] names the word (AMD: byte offset of an aligned 64-bit word;
    /// Intel: encoding of the field). The high half is the number of bits by which the value is
    /// shifted to the left.
    RunField = 45,

    // Hypervisor, in an exit
    /// #PF in the handler of an exit.
    ExitPageFault = 64,
    /// #GP in the handler of an exit.
    ExitGeneralProtection = 65,
    /// #UD in the handler of an exit.
    ExitInvalidOpcode = 66,
    /// Stack overflow in the handler of an exit: #DF by way of the unmapped page.
    ExitStackOverflow = 67,
    /// Panic in the handler of an exit.
    ExitPanic = 68,
    /// The handler treats the exit as an unknown one.
    ExitUnknown = 69,
    /// The control block is corrupted before the guest is resumed.
    ExitCorruptControl = 70,
    /// The guest state in the control block is corrupted before the guest is resumed.
    ExitCorruptState = 71,
    /// #PF during a detach.
    DetachPageFault = 72,
    /// Panic during a detach.
    DetachPanic = 73,
    /// The exit reports a spurious event as being in delivery.
    ExitEvent = 74,
    /// #PF in the answer to one of the driver's own hypercalls, which saves no vector register.
    QuickPageFault = 75,
}

/// An armed fault point. The driver keeps it and hands it to the hypervisor in a CPU's area.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultArm {
    /// [`FaultPoint`] as a number; 0: none.
    pub point: u32,
    /// Number of passages until the point fires; each passage counts it down by one.
    pub passage: u32,
    /// For [`FaultPoint::Facts`]: byte offset of an aligned 32-bit word in
    /// [`crate::facts::CpuFacts`]. For [`FaultPoint::RunField`]: the word and the shift described
    /// there.
    pub offset: u32,
    /// For [`FaultPoint::Facts`]: the new value of the word. For [`FaultPoint::RunField`]: the bits
    /// to be flipped.
    pub value: u32,
}
