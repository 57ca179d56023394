//! Devices that write to memory without a call of the kernel's DMA interface each time, and virtual
//! machines whose writes bypass the hypervisor's tables. Their writes at the wrong moment would be
//! missing in an image.
//!
//! Most of these devices write only while a process has them open. So a device in use counts, and
//! its users are named. A device whose users are unknown counts as used.

use super::{
    openers::{self, Openers, Process},
    rdma::{self, User},
};
use mercury_abi::{code::Code, restart::LANDING_CPUS_MAX};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    module,
    sysroot::Sysroot,
};
use std::{cell::LazyCell, collections::BTreeSet, io, ops::Deref, path::Path};

/// Names each such device in use with its users, such as "GPU 0000:01:00.0 (nvidia), used by train
/// (77)".
#[must_use]
pub fn untracked(sysroot: &Sysroot) -> Vec<String> {
    untracked_by(sysroot, &rdma::users)
}

/// Names the devices, with `rdma` for the users of an RDMA device.
fn untracked_by(sysroot: &Sysroot, rdma: &dyn Fn(&str) -> io::Result<BTreeSet<User>>) -> Vec<String> {
    // Most machines have no such device, and need no look at the open files of all processes.
    let openers = LazyCell::new(|| Openers::read(sysroot));
    let mut found = Vec::new();
    if posts_interrupts(&sysroot.text("proc/cmdline").unwrap_or_default()) {
        found.push("an IOMMU that keeps interrupts in memory (boot without intremap=posted_msi)".into());
    }
    for name in sysroot.names("sys/class/uacce") {
        let users = openers.of(|target| target == format!("/dev/{name}"));
        found.extend(used(format!("accelerator {name}, which shares the memory of processes"), &users));
    }
    for name in sysroot.names("sys/class/nvme") {
        let file = format!("sys/class/nvme/{name}/hmb");
        if sysroot.flag(&file) == Some(true) {
            found.push(format!(
                "NVMe controller {name}, which keeps its tables in this machine's memory (echo 0 > /{file})"
            ));
        }
    }
    found.extend(rdma_devices(sysroot, &openers, rdma));
    for address in sysroot.names("sys/bus/pci/devices") {
        found.extend(PciDevice::new(address, sysroot).and_then(|device| device.untracked(&openers)));
    }
    found.extend(driven_by_vfio(sysroot, &openers));
    found.extend(vdpa_devices(sysroot, &openers));
    if sysroot.exists("sys/module/kvm") && !guests_are_seen(sysroot) {
        let users = openers.of(|target| target == "anon_inode:kvm-vm");
        found.extend(
            users.iter().map(|process| format!("a virtual machine of {}", openers::names([*process]))),
        );
    }
    found
}

/// Names CXL regions. After a restart no memory answers at their addresses until a driver has
/// programmed the decoders again, but the kernel of a restored machine assumes that they are
/// programmed.
#[must_use]
pub fn forgotten(sysroot: &Sysroot) -> Vec<String> {
    let devices = sysroot.names("sys/bus/cxl/devices");
    let is_region = |name: &String| {
        let number = name.strip_prefix("region");
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let is_in_use =
        |name: &String| sysroot.flag(&format!("sys/bus/cxl/devices/{name}/commit")) != Some(false);
    devices.into_iter().filter(is_region).filter(is_in_use).map(|name| format!("CXL memory {name}")).collect()
}

/// Describes a device that processes use; returns `None` if none does.
fn used(device: String, users: &[&Process]) -> Option<String> {
    (!users.is_empty()).then(|| format!("{device}, used by {}", openers::names(users.iter().copied())))
}

/// Names RDMA devices in use. Ordinary network cards have one as soon as their RDMA module is
/// loaded.
fn rdma_devices(
    sysroot: &Sysroot,
    openers: &impl Deref<Target = Openers>,
    rdma: &dyn Fn(&str) -> io::Result<BTreeSet<User>>,
) -> Vec<String> {
    let described = |name: String| {
        let mut users: BTreeSet<String> = match rdma(&name) {
            Ok(users) => users.iter().map(|user| user.named(sysroot)).collect(),
            Err(error) => {
                return Some(format!("RDMA device {name}, whose users are unknown ({error})"));
            }
        };
        // A process without a context has no resource yet, and may get one at any time.
        let mut nodes = sysroot.names("sys/class/infiniband_verbs");
        nodes.retain(|node| {
            sysroot.text(&format!("sys/class/infiniband_verbs/{node}/ibdev")).as_ref() == Some(&name)
        });
        let is_node = |target: &str| nodes.iter().any(|node| target == format!("/dev/infiniband/{node}"));
        users.extend(openers.of(is_node).into_iter().map(|process| openers::names([process])));
        let users: Vec<_> = users.into_iter().collect();
        (!users.is_empty()).then(|| format!("RDMA device {name}, used by {}", users.join(", ")))
    };
    sysroot.names("sys/class/infiniband").into_iter().filter_map(described).collect()
}

/// Names devices in use that VFIO gives to processes, and that are not PCI devices of a driver of VFIO:
/// mediated devices, which are parts of a device with another driver, and devices on other buses.
fn driven_by_vfio(sysroot: &Sysroot, openers: &impl Deref<Target = Openers>) -> Vec<String> {
    let mut found = Vec::new();
    let addresses = sysroot.names("sys/bus/pci/devices").into_iter();
    let by_driver = addresses.filter_map(|address| PciDevice::new(address, sysroot));
    let mut known: BTreeSet<_> = by_driver
        .filter(|device| device.driver.contains("vfio"))
        .flat_map(|device| vfio_nodes(&device.file(""), sysroot))
        .collect();
    for name in sysroot.names("sys/bus/mdev/devices") {
        let nodes = vfio_nodes(&format!("sys/bus/mdev/devices/{name}"), sysroot);
        let device = format!("mediated device {name}, which a process drives by itself");
        found.extend(used(device, &openers.of(|target| nodes.contains(target))));
        known.extend(nodes);
    }
    let groups = sysroot.names("sys/class/vfio").into_iter().map(|name| format!("/dev/vfio/{name}"));
    let devices = sysroot.names("sys/class/vfio-dev").into_iter();
    let all = groups.chain(devices.map(|name| format!("/dev/vfio/devices/{name}")));
    for node in all.filter(|node| !known.contains(node)) {
        let device = format!("device of VFIO {node}, which a process drives by itself");
        found.extend(used(device, &openers.of(|target| target == node)));
    }
    found
}

/// Returns the device files by which VFIO gives a device to a process: its group's, and its own.
fn vfio_nodes(folder: &str, sysroot: &Sysroot) -> BTreeSet<String> {
    let group = std::fs::read_link(sysroot.path(&format!("{folder}/iommu_group"))).ok();
    let group = group.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let mut nodes: BTreeSet<_> = sysroot
        .names(&format!("{folder}/vfio-dev"))
        .iter()
        .map(|name| format!("/dev/vfio/devices/{name}"))
        .collect();
    // Without an IOMMU the group's name says so.
    nodes.extend(
        group
            .into_iter()
            .flat_map(|group| [format!("/dev/vfio/{group}"), format!("/dev/vfio/noiommu-{group}")]),
    );
    nodes
}

/// Names devices of vDPA in use by processes. Data of a device that the kernel or another process imitates is
/// copied by CPUs, which is seen.
fn vdpa_devices(sysroot: &Sysroot, openers: &impl Deref<Target = Openers>) -> Vec<String> {
    let described = |name: String| {
        let folder = format!("sys/bus/vdpa/devices/{name}");
        if is_imitated(&sysroot.path(&folder), sysroot) {
            return None;
        }
        let nodes: BTreeSet<_> = sysroot.names(&folder).iter().map(|node| format!("/dev/{node}")).collect();
        let is_node = |target: &str| target.starts_with("/dev/vhost-vdpa-") && nodes.contains(target);
        used(format!("vDPA device {name}, which a process drives by itself"), &openers.of(is_node))
    };
    sysroot.names("sys/bus/vdpa/devices").into_iter().filter_map(described).collect()
}

/// Returns true if a device on a bus lies below no other device: the kernel made it.
fn is_imitated(link: &Path, sysroot: &Sysroot) -> bool {
    let all = sysroot.path("sys/devices").canonicalize().ok();
    let place = link.canonicalize().ok();
    let Some((all, place)) = all.zip(place) else { return false };
    place.starts_with(all.join("virtual")) || place.parent() == Some(&all)
}

/// A device file, or several by the beginning of their names.
enum Node {
    Named(String),
    BeginsWith(&'static str),
}

impl Node {
    fn is(&self, target: &str) -> bool {
        match self {
            Self::Named(name) => target == name,
            Self::BeginsWith(name) => target.starts_with(name),
        }
    }
}

/// A PCI device with a driver.
struct PciDevice<'a> {
    address: String,
    driver: String,
    sysroot: &'a Sysroot,
}

impl<'a> PciDevice<'a> {
    fn new(address: String, sysroot: &'a Sysroot) -> Option<Self> {
        let link = sysroot.path(&format!("sys/bus/pci/devices/{address}/driver"));
        let driver = std::fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned();
        Some(Self { address, driver, sysroot })
    }

    fn file(&self, name: &str) -> String {
        format!("sys/bus/pci/devices/{}/{name}", self.address)
    }

    /// Describes the device with its users if it may write to memory unseen.
    fn untracked(&self, openers: &impl Deref<Target = Openers>) -> Option<String> {
        let Self { address, driver, .. } = self;
        if driver.contains("vfio") {
            let device = format!("device {address}, which a process drives by itself ({driver})");
            let nodes = vfio_nodes(&self.file(""), self.sysroot);
            return used(device, &openers.of(|target| nodes.contains(target)));
        }
        if driver.contains("uio") {
            return self.driven_by_uio(openers);
        }
        if driver == "idxd" {
            let device = format!("accelerator {address} ({driver}), which shares the memory of processes");
            let is_queue = |target: &str| target.starts_with("/dev/dsa/") || target.starts_with("/dev/iax/");
            return used(device, &openers.of(is_queue));
        }
        let class = self.sysroot.text(&self.file("class")).unwrap_or_default();
        if !is_accelerator(&class) || is_plain(driver) {
            return None;
        }
        let device = format!("GPU {address} ({driver})");
        let nodes = self.nodes();
        if nodes.is_empty() {
            return Some(format!("{device}, whose users are unknown"));
        }
        let users = openers.of(|target| nodes.iter().any(|node| node.is(target)));
        // systemd-logind opens screens for other processes, which have them open themselves then.
        let users: Vec<_> = users.into_iter().filter(|process| process.name != "systemd-logind").collect();
        used(device, &users)
    }

    /// Returns the device files by which processes use a GPU or an accelerator.
    fn nodes(&self) -> Vec<Node> {
        let of = |class: &str, folder: &str| -> Vec<Node> {
            let names = self.sysroot.names(&self.file(class)).into_iter();
            // Connectors such as card0-DP-1 are in the folder as well.
            let names = names.filter(|name| !name.contains('-'));
            names.map(|name| Node::Named(format!("/dev/{folder}/{name}"))).collect()
        };
        let mut nodes = of("drm", "dri");
        nodes.extend(of("accel", "accel"));
        match self.driver.as_str() {
            "nvidia" => nodes.push(Node::BeginsWith("/dev/nvidia")),
            "amdgpu" => nodes.push(Node::Named("/dev/kfd".into())),
            _ => {}
        }
        nodes
    }

    /// Describes a device that uio gives to a process. It may go on when the process has ended,
    /// until its bus mastering is off.
    fn driven_by_uio(&self, openers: &Openers) -> Option<String> {
        let Self { address, driver, .. } = self;
        let device = format!("device {address}, which a process drives by itself ({driver})");
        let nodes = self.sysroot.names(&self.file("uio"));
        let users = openers.of(|target| nodes.iter().any(|node| target == format!("/dev/{node}")));
        if users.is_empty() && self.is_bus_master() {
            return Some(format!("{device}, and which is still a bus master"));
        }
        used(device, &users)
    }

    /// Returns true if the device may write to memory, or its state is unknown.
    fn is_bus_master(&self) -> bool {
        const COMMAND: usize = 4;
        const BUS_MASTER: u8 = 1 << 2;
        let config = self.sysroot.bytes(&self.file("config")).unwrap_or_default();
        config.get(COMMAND).is_none_or(|command| command & BUS_MASTER != 0)
    }
}

/// Returns true if virtual machines run on tables that the hypervisor can shadow: KVM's nested
/// ones, on AMD. Their interrupts must come by exits, too.
fn guests_are_seen(sysroot: &Sysroot) -> bool {
    module::kvm_amd_has(sysroot, "npt") == Some(true) && module::kvm_amd_has(sysroot, "avic") == Some(false)
}

/// Returns true if the kernel's command line makes the IOMMU record interrupts in memory. The
/// kernel does not do so by default.
fn posts_interrupts(command_line: &str) -> bool {
    let options = command_line.split_whitespace().filter_map(|word| word.strip_prefix("intremap="));
    options.flat_map(|options| options.split(',')).any(|option| option == "posted_msi")
}

/// Returns true for PCI classes of GPUs and accelerators: display controllers and processing
/// accelerators.
fn is_accelerator(class: &str) -> bool {
    class.starts_with("0x03") || class.starts_with("0x12")
}

/// Returns true for drivers of simple screens that do not write to memory.
fn is_plain(driver: &str) -> bool {
    matches!(
        driver,
        "bochs-drm" | "virtio-pci" | "ast" | "mgag200" | "cirrus" | "simple-framebuffer" | "efifb"
    )
}

/// Refuses devices that write to memory unseen, and names them.
pub fn refuse_untracked(sysroot: &Sysroot) -> Result<()> {
    let found = untracked(sysroot);
    if found.is_empty() {
        return Ok(());
    }
    let text = format!("these write to memory that the driver cannot see: {}", found.join("; "));
    Err(Error::coded(Code::DevicesUnseen, text))
}

/// Refuses an image for which memory was read while a process began to use such a device.
///
/// The driver sees VFIO, uio and shared page tables itself ([`Code::SnapshotDevices`]).
///
/// # Errors
///
/// Returns an error that names the devices.
pub fn refuse_begun(sysroot: &Sysroot) -> Result<()> {
    refuse_untracked(sysroot).map_err(|error| Error {
        message: format!(
            "the image is not complete, because devices came into use after the instant; {}",
            error.message
        ),
        ..error
    })
}

/// Refuses hardware that another kernel would have to set up before the machine goes on, and names
/// it.
pub fn refuse_forgotten(sysroot: &Sysroot) -> Result<()> {
    let found = forgotten(sysroot);
    if found.is_empty() {
        return Ok(());
    }
    let text = format!("a restart forgets this memory until a driver has set it up: {}", found.join(", "));
    Err(Error::coded(Code::MemoryForgotten, text))
}

/// Refuses CPUs that are present and offline. They wait in kernel text that a restore writes over,
/// so such a machine cannot be brought back.
pub fn refuse_offline(sysroot: &Sysroot) -> Result<()> {
    let offline = sysroot.offline_cpus();
    if offline.is_empty() {
        return Ok(());
    }
    let text =
        format!("CPUs {offline} are present and offline: a machine with offline CPUs cannot be brought back");
    Err(Error::coded(Code::CpusOffline, text))
}

/// Refuses a machine with more CPUs than a restore can bring back.
pub fn refuse_many_cpus(sysroot: &Sysroot) -> Result<()> {
    let online = sysroot.online_cpus().iter().count();
    if online <= LANDING_CPUS_MAX {
        return Ok(());
    }
    let text = format!("{online} CPUs are online, and a restore brings back {LANDING_CPUS_MAX} at the most");
    Err(Error::new(Exit::Impossible, text)
        .hint("start the machine with fewer CPUs (`nr_cpus=` on the kernel's command line, or without SMT)"))
}

#[cfg(test)]
mod tests {
    use super::{super::openers::tests::process, *};
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn cxl_memory_is_forgotten() {
        let root = tempfile::tempdir().expect("a folder");
        let found = || forgotten(&Sysroot::at(root.path()));
        let device = |name: &str, commit: &str| {
            let folder = root.path().join("sys/bus/cxl/devices").join(name);
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join("commit"), commit).expect("a file");
        };
        assert_eq!(found(), [""; 0]);
        device("mem0", "1\n");
        device("region0", "0\n");
        assert_eq!(found(), [""; 0], "its decoders are not in use");
        device("region0", "1\n");
        let refusal = refuse_forgotten(&Sysroot::at(root.path())).expect_err("refused");
        assert_eq!(refusal.code, Some(Code::MemoryForgotten));
        assert_eq!(found(), ["CXL memory region0"]);
    }

    #[test]
    fn an_nvme_controller_with_tables_in_memory_is_named() {
        let root = Root::new();
        root.write("sys/class/nvme/nvme0/hmb", b"0\n");
        assert_eq!(root.untracked(), [""; 0]);
        root.write("sys/class/nvme/nvme0/hmb", b"1\n");
        assert!(root.untracked()[0].contains("/sys/class/nvme/nvme0/hmb"), "{:?}", root.untracked());
    }

    struct Root(tempfile::TempDir);

    impl Root {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a folder"))
        }

        fn path(&self) -> &Path {
            self.0.path()
        }

        fn write(&self, file: &str, content: &[u8]) {
            let path = self.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, content).expect("a file");
        }

        fn folder(&self, path: &str) {
            fs::create_dir_all(self.path().join(path)).expect("a folder");
        }

        fn device(&self, address: &str, class: &str, driver: &str) -> String {
            let folder = format!("sys/bus/pci/devices/{address}");
            self.write(&format!("{folder}/class"), class.as_bytes());
            symlink(format!("../drivers/{driver}"), self.path().join(&folder).join("driver"))
                .expect("a link");
            folder
        }

        fn untracked(&self) -> Vec<String> {
            untracked_by(&Sysroot::at(self.path()), &|_| Ok(BTreeSet::new()))
        }
    }

    #[test]
    fn devices_count_when_a_process_has_them_open() {
        let root = Root::new();
        root.device("0000:00:01.0", "0x030000", "nvidia");
        root.device("0000:00:02.0", "0x030000", "ast");
        let passed = root.device("0000:00:03.0", "0x020000", "vfio-pci");
        symlink("../../../kernel/iommu_groups/12", root.path().join(passed).join("iommu_group"))
            .expect("a link");
        root.device("0000:00:04.0", "0x020000", "e1000e");
        root.device("0000:00:05.0", "0x088000", "idxd");
        let second = root.device("0000:00:06.0", "0x038000", "amdgpu");
        root.folder(&format!("{second}/drm/renderD129"));
        root.folder(&format!("{second}/drm/card1"));
        root.folder(&format!("{second}/drm/card1-DP-1"));
        root.folder("sys/class/uacce/hisi_zip-0");
        assert_eq!(root.untracked(), [""; 0]);
        process(
            root.path(),
            5,
            "other",
            &["/dev/dri/renderD128", "/dev/vfio/1", "/dev/vfio/vfio", "/dev/null"],
        );
        process(root.path(), 6, "systemd-logind", &["/dev/dri/card1"]);
        assert_eq!(root.untracked(), [""; 0]);
        process(root.path(), 70, "train", &["/dev/nvidiactl", "/dev/nvidia0"]);
        process(root.path(), 71, "dpdk", &["/dev/vfio/12", "/dev/dsa/wq0.0"]);
        process(root.path(), 72, "zip", &["/dev/hisi_zip-0", "/dev/dri/renderD129"]);
        assert_eq!(
            root.untracked(),
            [
                "accelerator hisi_zip-0, which shares the memory of processes, used by zip (72)",
                "GPU 0000:00:01.0 (nvidia), used by train (70)",
                "device 0000:00:03.0, which a process drives by itself (vfio-pci), used by dpdk (71)",
                "accelerator 0000:00:05.0 (idxd), which shares the memory of processes, used by dpdk (71)",
                "GPU 0000:00:06.0 (amdgpu), used by zip (72)",
            ]
        );
    }

    /// A part of a device whose driver is not VFIO's, and a device on another bus.
    #[test]
    fn devices_of_vfio_count_whatever_drives_their_parents() {
        let root = Root::new();
        let parent = root.device("0000:00:02.0", "0x030000", "ast");
        let name = "4b20d080-1b54-4048-85b3-a6a62d165c01";
        root.folder(&format!("{parent}/{name}/vfio-dev/vfio3"));
        root.folder("sys/bus/mdev/devices");
        let mediated = root.path().join(&parent).join(name);
        symlink("../../../../../kernel/iommu_groups/15", mediated.join("iommu_group")).expect("a link");
        symlink(&mediated, root.path().join("sys/bus/mdev/devices").join(name)).expect("a link");
        let passed = root.device("0000:00:03.0", "0x020000", "vfio-pci");
        symlink("../../../kernel/iommu_groups/12", root.path().join(passed).join("iommu_group"))
            .expect("a link");
        for group in ["12", "15", "16"] {
            root.folder(&format!("sys/class/vfio/{group}"));
        }
        root.folder("sys/class/vfio-dev/vfio3");
        process(root.path(), 70, "vfiod", &["/dev/vfio/vfio", "/dev/vfio/1"]);
        assert_eq!(root.untracked(), [""; 0]);
        process(root.path(), 71, "dpdk", &["/dev/vfio/12"]);
        process(root.path(), 72, "qemu", &["/dev/vfio/15"]);
        process(root.path(), 73, "other", &["/dev/vfio/16"]);
        process(root.path(), 74, "newer", &["/dev/vfio/devices/vfio3"]);
        assert_eq!(
            root.untracked(),
            [
                "device 0000:00:03.0, which a process drives by itself (vfio-pci), used by dpdk (71)",
                &format!(
                    "mediated device {name}, which a process drives by itself, used by qemu (72), newer (74)"
                ),
                "device of VFIO /dev/vfio/16, which a process drives by itself, used by other (73)",
            ]
        );
    }

    #[test]
    fn devices_of_vdpa_count_if_hardware_moves_their_data() {
        let root = Root::new();
        root.folder("sys/bus/vdpa/devices");
        let device = |name: &str, at: &str, node: &str| {
            root.folder(&format!("{at}/{name}/{node}"));
            symlink(root.path().join(at).join(name), root.path().join("sys/bus/vdpa/devices").join(name))
                .expect("a link");
        };
        device("vdpa0", "sys/devices/pci0000:00/0000:00:03.0/mlx5_core.vnet.0", "vhost-vdpa-0");
        device("vdpa1", "sys/devices", "vhost-vdpa-1");
        device("vduse0", "sys/devices/virtual/vduse/vduse0", "vhost-vdpa-2");
        // The kernel's own driver has this one.
        device("vdpa3", "sys/devices/pci0000:00/0000:00:04.0", "virtio7");
        process(root.path(), 70, "sim", &["/dev/vhost-vdpa-1", "/dev/vhost-vdpa-2", "/dev/null"]);
        assert_eq!(root.untracked(), [""; 0]);
        process(root.path(), 71, "qemu", &["/dev/vhost-vdpa-0"]);
        assert_eq!(
            root.untracked(),
            ["vDPA device vdpa0, which a process drives by itself, used by qemu (71)"]
        );
    }

    /// A GPU without device files has unknown users.
    #[test]
    fn a_gpu_of_an_unknown_kind_counts_as_used() {
        let root = Root::new();
        root.device("0000:00:01.0", "0x120000", "secret");
        assert_eq!(root.untracked(), ["GPU 0000:00:01.0 (secret), whose users are unknown"]);
        let begun = refuse_begun(&Sysroot::at(root.path())).expect_err("refused");
        assert_eq!(begun.code, Some(Code::DevicesUnseen));
        assert!(begun.message.starts_with("the image is not complete"), "{begun}");
    }

    #[test]
    fn a_device_of_uio_may_outlive_its_process() {
        let root = Root::new();
        let folder = root.device("0000:00:03.0", "0x020000", "uio_pci_generic");
        root.folder(&format!("{folder}/uio/uio0"));
        let command = |command: u8| root.write(&format!("{folder}/config"), &[0x86, 0x80, 0, 0, command, 0]);
        command(0x06);
        assert!(root.untracked()[0].ends_with("still a bus master"), "{:?}", root.untracked());
        command(0x02);
        assert_eq!(root.untracked(), [""; 0]);
        process(root.path(), 71, "dpdk", &["/dev/uio0"]);
        assert!(root.untracked()[0].ends_with("used by dpdk (71)"), "{:?}", root.untracked());
    }

    #[test]
    fn rdma_devices_count_by_their_users() {
        let root = Root::new();
        root.folder("sys/class/infiniband/mlx5_0");
        root.write("sys/class/infiniband_verbs/uverbs3/ibdev", b"mlx5_0\n");
        root.write("sys/class/infiniband_verbs/uverbs4/ibdev", b"mlx5_1\n");
        process(root.path(), 77, "mpirun", &["/dev/infiniband/uverbs4"]);
        let with = |users: &[User]| {
            let users: BTreeSet<_> = users.iter().cloned().collect();
            untracked_by(&Sysroot::at(root.path()), &move |_| Ok(users.clone()))
        };
        assert_eq!(with(&[]), [""; 0]);
        assert_eq!(
            with(&[User::Process(77), User::Module("rpcrdma".into())]),
            ["RDMA device mlx5_0, used by mpirun (77), the kernel's module rpcrdma"]
        );
        let cannot = untracked_by(&Sysroot::at(root.path()), &|_| Err(io::ErrorKind::Unsupported.into()));
        assert!(cannot[0].contains("are unknown"), "{cannot:?}");
        process(root.path(), 78, "opener", &["/dev/infiniband/uverbs3"]);
        assert_eq!(with(&[]), ["RDMA device mlx5_0, used by opener (78)"]);
    }

    #[test]
    fn virtual_machines_count_where_they_cannot_be_seen() {
        let root = Root::new();
        process(root.path(), 77, "qemu", &["anon_inode:kvm-vm"]);
        root.folder("sys/module/kvm");
        assert_eq!(root.untracked(), ["a virtual machine of qemu (77)"]);
        let parameter =
            |name: &str, value: &[u8]| root.write(&format!("sys/module/kvm_amd/parameters/{name}"), value);
        parameter("npt", b"Y");
        parameter("avic", b"N");
        assert_eq!(root.untracked(), [""; 0]);
        parameter("npt", b"N");
        assert_eq!(root.untracked().len(), 1);
    }

    #[test]
    fn an_iommu_that_posts_interrupts_is_named() {
        let root = Root::new();
        root.write("proc/cmdline", b"quiet intremap=nosid intel_iommu=on");
        assert_eq!(root.untracked(), [""; 0]);
        root.write("proc/cmdline", b"intremap=nosid,posted_msi quiet");
        assert!(root.untracked()[0].contains("IOMMU"));
    }
}
