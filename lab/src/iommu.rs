//! IOMMUs, which stand between devices and memory: QEMU's arguments for them, and the check that a
//! machine uses its IOMMU.

use crate::{
    error::{Error, Result},
    machine::Machine,
};

/// The vendor of the IOMMU. Linux drives both on any processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Iommu {
    /// AMD's IOMMU. The cloud kernels have no driver for it.
    Amd,
    /// Intel's IOMMU.
    Intel,
}

/// The virtio devices that machines have.
const VIRTIO: &[&str] = &["blk", "net", "serial", "balloon", "rng"];

/// A program that fails and prints the condition that does not hold.
const AT_WORK: &str = r#"
for device in /sys/bus/pci/drivers/{nvme,ahci,e1000e,xhci_hcd}/0000:*; do
    test -e $device || continue
    kind=$(cat $device/iommu_group/type)
    case $kind in
        DMA*) translated=$device;;
        *) echo "what ${device##*/} says is not translated: $kind"; exit 1;;
    esac
done
test "$translated" || { echo "there is no device behind it"; exit 1; }
grep -q IR-PCI-MSI /proc/interrupts || { echo "interrupts are not remapped"; exit 1; }
! dmesg | grep -E 'IO_PAGE_FAULT|DMAR: .*fault|Completion-Wait loop timed out|ILLEGAL_DEV_TABLE_ENTRY'
"#;

/// A further check for virtio devices. They bypass the IOMMU whatever their group says, unless they
/// agreed to VIRTIO_F_ACCESS_PLATFORM (virtio 1.1, 6).
const VIRTIO_TOO: &str = r#"
for device in /sys/bus/virtio/devices/*; do
    test "$(cut -c 34 $device/features)" = 1 || { echo "${device##*/} goes round it"; exit 1; }
done
"#;

impl Iommu {
    /// Returns QEMU's arguments for the IOMMU.
    ///
    /// - `dma-remap`: without it, AMD's IOMMU passes everything as it is, whatever its tables say.
    /// - virtio devices bypass both IOMMUs unless they are told not to and are no legacy devices.
    ///   Behind AMD's they find no requests (docs/lab.md).
    /// - `strict` makes the BIOS leave alone the virtio disks from which nothing is booted.
    ///   Otherwise the BIOS gives such a disk queues that the disk may not read any more once the
    ///   IOMMU translates. A read of them is then a fault.
    pub(crate) fn arguments(self) -> Vec<String> {
        let (iommu, behind): (_, &[&str]) = match self {
            Self::Amd => ("amd-iommu,dma-remap=on,intremap=on", &[]),
            Self::Intel => ("intel-iommu,intremap=on,eim=on", VIRTIO),
        };
        let new = behind.iter().map(|device| format!("virtio-{device}-pci.disable-legacy=on"));
        let platform = (self == Self::Intel).then(|| "virtio-device.iommu_platform=on".to_owned());
        let globals = new.chain(platform).flat_map(|global| ["-global".to_owned(), global]);
        let all = ["-device", iommu].map(str::to_owned).into_iter().chain(globals);
        let strict = (self == Self::Intel).then_some(["-boot", "strict=on"]);
        all.chain(strict.into_iter().flatten().map(str::to_owned)).collect()
    }

    /// Returns the kernel's argument for the IOMMU. The kernel uses AMD's without an argument.
    pub(crate) fn kernel_argument(self) -> Option<&'static str> {
        (self == Self::Intel).then_some("intel_iommu=on")
    }
}

/// Checks that a machine's IOMMU, if there is one, translates the devices' addresses and has
/// recorded no fault.
///
/// # Errors
/// With the condition that does not hold.
pub fn check(machine: &Machine) -> Result<()> {
    let lines = match machine.iommu() {
        None => return Ok(()),
        Some(Iommu::Amd) => AT_WORK.to_owned(),
        Some(Iommu::Intel) => format!("{VIRTIO_TOO}{AT_WORK}"),
    };
    let output = machine.run(&lines)?;
    if output.success() {
        return Ok(());
    }
    Err(machine.blame(Error::Unhealthy(format!("the IOMMU: {}{}", output.stdout, output.stderr))))
}
