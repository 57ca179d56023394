//! Devices that write to memory without the kernel's DMA interface being asked each time, and virtual machines that write
//! to it round the hypervisor's tables: what they write at the wrong moment would be missing in an image.

use crate::{module, sysroot::Sysroot};

/// Each of them, and why; such as "GPU 0000:01:00.0 (nvidia)".
#[must_use]
pub fn untracked(sysroot: &Sysroot) -> Vec<String> {
    let mut found = Vec::new();
    if posts_interrupts(&sysroot.text("proc/cmdline").unwrap_or_default()) {
        found.push("an IOMMU that keeps interrupts in memory (boot without intremap=posted_msi)".into());
    }
    for name in sysroot.names("sys/class/uacce") {
        found.push(format!("accelerator {name}, which shares the memory of processes"));
    }
    for name in sysroot.names("sys/class/nvme") {
        let file = format!("sys/class/nvme/{name}/hmb");
        if sysroot.flag(&file) == Some(true) {
            found.push(format!(
                "NVMe controller {name}, which keeps its tables in this machine's memory (echo 0 > /{file})"
            ));
        }
    }
    for name in sysroot.names("sys/class/infiniband") {
        found.push(format!("RDMA device {name}"));
    }
    for address in sysroot.names("sys/bus/pci/devices") {
        let folder = format!("sys/bus/pci/devices/{address}");
        let class = sysroot.text(&format!("{folder}/class")).unwrap_or_default();
        let driver = std::fs::read_link(sysroot.path(&format!("{folder}/driver"))).ok();
        let Some(driver) = driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        else {
            continue;
        };
        if driver.contains("vfio") || driver.contains("uio") {
            found.push(format!("device {address}, which a process drives by itself ({driver})"));
        } else if driver == "idxd" {
            found.push(format!("accelerator {address} ({driver}), which shares the memory of processes"));
        } else if is_accelerator(&class) && !is_plain(&driver) {
            found.push(format!("GPU {address} ({driver})"));
        }
    }
    if !guests_are_seen(sysroot) {
        found.extend(virtual_machines(sysroot));
    }
    found
}

/// CXL regions: after a restart no memory answers at their addresses, until a driver has programmed the decoders again. A
/// machine that is brought back believes that they are.
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

/// Whether virtual machines run on tables that the hypervisor can shadow: KVM's nested ones, on AMD. Their interrupts must
/// come by exits, too.
fn guests_are_seen(sysroot: &Sysroot) -> bool {
    module::kvm_amd_has(sysroot, "npt") == Some(true) && module::kvm_amd_has(sysroot, "avic") == Some(false)
}

/// Processes with virtual machines of KVM's, such as "a virtual machine of qemu-system-x86 (1234)".
fn virtual_machines(sysroot: &Sysroot) -> Vec<String> {
    let has_one = |process: &str| {
        let folder = format!("proc/{process}/fd");
        let is_one = |name: &String| {
            std::fs::read_link(sysroot.path(&format!("{folder}/{name}")))
                .is_ok_and(|target| target.as_os_str() == "anon_inode:kvm-vm")
        };
        sysroot.names(&folder).iter().any(is_one)
    };
    let described = |process: &String| {
        let name = sysroot.text(&format!("proc/{process}/comm")).unwrap_or_default();
        format!("a virtual machine of {} ({process})", name.trim())
    };
    let numbers =
        sysroot.names("proc").into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    numbers.filter(|process| has_one(process)).map(|process| described(&process)).collect()
}

/// Whether the kernel was told to have the IOMMU note interrupts in memory. It does not do so by itself.
fn posts_interrupts(command_line: &str) -> bool {
    let options = command_line.split_whitespace().filter_map(|word| word.strip_prefix("intremap="));
    options.flat_map(|options| options.split(',')).any(|option| option == "posted_msi")
}

/// PCI classes of GPUs and accelerators: display controllers and processing accelerators.
fn is_accelerator(class: &str) -> bool {
    class.starts_with("0x03") || class.starts_with("0x12")
}

/// Drivers of screens without a mind of their own.
fn is_plain(driver: &str) -> bool {
    matches!(
        driver,
        "bochs-drm" | "virtio-pci" | "ast" | "mgag200" | "cirrus" | "simple-framebuffer" | "efifb"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
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
        assert_eq!(found(), ["CXL memory region0"]);
    }

    #[test]
    fn what_cannot_be_seen_is_named() {
        let root = tempfile::tempdir().expect("a folder");
        let device = |address: &str, class: &str, driver: &str| {
            let folder = root.path().join("sys/bus/pci/devices").join(address);
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join("class"), class).expect("a file");
            symlink(format!("../drivers/{driver}"), folder.join("driver")).expect("a link");
        };
        device("0000:00:01.0", "0x030000", "nvidia");
        device("0000:00:02.0", "0x030000", "ast");
        device("0000:00:03.0", "0x020000", "vfio-pci");
        device("0000:00:04.0", "0x020000", "e1000e");
        fs::create_dir_all(root.path().join("sys/class/infiniband/mlx5_0")).expect("a folder");
        device("0000:00:05.0", "0x088000", "idxd");
        fs::create_dir_all(root.path().join("sys/class/uacce/hisi_zip-0")).expect("a folder");
        let command_line = |words: &str| {
            fs::create_dir_all(root.path().join("proc")).expect("a folder");
            fs::write(root.path().join("proc/cmdline"), words).expect("a file");
        };
        let process = root.path().join("proc/77");
        fs::create_dir_all(process.join("fd")).expect("a folder");
        fs::write(process.join("comm"), "qemu\n").expect("a file");
        symlink("anon_inode:kvm-vm", process.join("fd/9")).expect("a link");
        command_line("quiet intremap=nosid intel_iommu=on");
        assert_eq!(untracked(&Sysroot::at(root.path())).len(), 6);
        let parameter = |name: &str, value: &str| {
            let folder = root.path().join("sys/module/kvm_amd/parameters");
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join(name), value).expect("a file");
        };
        parameter("npt", "Y");
        parameter("avic", "N");
        assert_eq!(untracked(&Sysroot::at(root.path())).len(), 5);
        let buffer = root.path().join("sys/class/nvme/nvme0");
        fs::create_dir_all(&buffer).expect("a folder");
        for (hmb, count) in [("0\n", 5), ("1\n", 6)] {
            fs::write(buffer.join("hmb"), hmb).expect("a file");
            let found = untracked(&Sysroot::at(root.path()));
            assert_eq!(
                found.iter().filter(|text| text.contains("/sys/class/nvme/nvme0/hmb")).count(),
                count - 5
            );
            assert_eq!(found.len(), count);
        }
        fs::remove_dir_all(&buffer).expect("gone");
        parameter("npt", "N");
        command_line("intremap=nosid,posted_msi quiet");
        let found = untracked(&Sysroot::at(root.path()));
        for (index, name) in
            ["IOMMU", "hisi_zip-0", "mlx5_0", "nvidia", "vfio-pci", "idxd", "virtual machine of qemu (77)"]
                .iter()
                .enumerate()
        {
            assert!(found.len() == 7 && found[index].contains(name), "{name}: {found:?}");
        }
    }
}
