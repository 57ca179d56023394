//! A machine that goes on as a guest: how its kernel finds out, and which devices wait for it.
//!
//! A checkpoint of a bare machine can go on as a guest of KVM on another host. Its own devices are gone
//! there. The monitor offers others: it answers a CPUID leaf of Mercury's, which leads the driver to a
//! [`GuestDescription`] in the guest's memory. The driver makes a device of each [`GuestSlot`].
//!
//! The description is the monitor's input to the driver. No part of the machine's own memory holds it.

/// CPUID leaf with the signature of Mercury's monitor: `MERCURY_GUEST_SIGNATURE_*` in EBX, ECX and EDX.
/// EAX is the highest leaf of the group.
pub const MERCURY_GUEST_LEAF: u32 = 0x4000_4D00;
/// CPUID leaf with the physical address of the [`GuestDescription`]: the low half in EAX, the high half in
/// EBX. ECX has the first of [`MERCURY_GUEST_PORTS`] ports by which the monitor answers calls, or 0.
pub const MERCURY_GUEST_LEAF_DESCRIPTION: u32 = MERCURY_GUEST_LEAF + 1;
/// EBX of [`MERCURY_GUEST_LEAF`], the first third of the text "MercuryGuest".
pub const MERCURY_GUEST_SIGNATURE_EBX: u32 = u32::from_le_bytes(*b"Merc");
/// ECX of [`MERCURY_GUEST_LEAF`].
pub const MERCURY_GUEST_SIGNATURE_ECX: u32 = u32::from_le_bytes(*b"uryG");
/// EDX of [`MERCURY_GUEST_LEAF`].
pub const MERCURY_GUEST_SIGNATURE_EDX: u32 = u32::from_le_bytes(*b"uest");

/// Number of the ports for calls. The monitor stands in for the hypervisor when the guest moves away.
/// Writing the page number of an argument to the first port plus the number of a
/// [`crate::snapshot::SnapshotCall`], 32 bits at once, makes the call. Reading 32 bits of the first port
/// tells its [`crate::code::Code`]. Both are done on one CPU with interrupts off. Virtual addresses in
/// arguments are those of that CPU. A snapshot can neither be kept nor hashed, and no dirty log follows it.
pub const MERCURY_GUEST_PORTS: u16 = 32;

/// Number of the port, from the first one on, that takes the command's words for the host's operator, byte by
/// byte. 32 bits at once are the error for which the kernel could not start the command.
pub const MERCURY_GUEST_ANSWER: u16 = 31;
/// A byte read from port [`MERCURY_GUEST_ANSWER`]: the host's operator lets a guest go on that stands still
/// in doubt about its move. Each word is read once. Other bytes mean nothing.
pub const MERCURY_GUEST_RESUME: u16 = 1;
/// A byte read there: the operator says that the guest runs at its destination.
pub const MERCURY_GUEST_ABANDON: u16 = 2;
/// Place of the host's order in the page of the [`GuestDescription`]: strings that end with a NUL each. The
/// first is a variable of the environment, and the others are words for the command `mercury`. An empty
/// string ends them.
pub const MERCURY_GUEST_ORDER: u32 = 1024;
/// Largest size of an order in bytes.
pub const MERCURY_GUEST_ORDER_MAX: u32 = 3072;

/// First field of a [`GuestDescription`]: the text "MRCGUEST".
pub const MERCURY_GUEST_MAGIC: u64 = u64::from_le_bytes(*b"MRCGUEST");
/// Version of the [`GuestDescription`]. The driver leaves another version's devices alone.
pub const MERCURY_GUEST_VERSION: u32 = 1;
/// Number of slots in a [`GuestDescription`].
pub const GUEST_SLOTS_MAX: usize = 16;

/// A virtio device with the MMIO transport (virtio 1.2, 4.2 "Virtio Over MMIO").
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestSlot {
    /// Physical address of the device's registers, page-aligned.
    pub window_phys: u64,
    /// Length of the registers in bytes: 4096.
    pub window_bytes: u32,
    /// Global system interrupt (an input of the IOAPIC), edge-triggered, active high.
    pub gsi: u32,
    /// Number of the device's kind in the virtio standard, for the log.
    pub device: u32,
    /// Reserved; zero on both sides.
    pub reserved: u32,
}

/// The devices that wait for the guest. The page with it lies outside of all memory that the kernel of the
/// guest knows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestDescription {
    /// [`MERCURY_GUEST_MAGIC`].
    pub magic: u64,
    /// [`MERCURY_GUEST_VERSION`].
    pub version: u32,
    /// Number of slots in use, at most [`GUEST_SLOTS_MAX`].
    pub count: u32,
    /// The devices; slots from `count` on are zero.
    pub slots: [GuestSlot; GUEST_SLOTS_MAX],
    /// Global system interrupt by which the monitor tells of an order, as a slot's. 0: it has none.
    pub doorbell_gsi: u32,
    /// Reserved; zero.
    pub reserved: u32,
}
