//! Devices that write to memory without the kernel's DMA interface being asked each time: what they write at the wrong
//! moment would be missing in an image.

use crate::sysroot::Sysroot;

/// Each of them, and why; such as "GPU 0000:01:00.0 (nvidia)".
#[must_use]
pub fn untracked(sysroot: &Sysroot) -> Vec<String> {
    let mut found = Vec::new();
    // No emulator shows whether what is written through one is seen: docs/limits.md.
    let translates = |group: &String| {
        let kind = sysroot.text(&format!("sys/kernel/iommu_groups/{group}/type"));
        kind.is_some_and(|kind| kind.starts_with("DMA"))
    };
    if sysroot.names("sys/kernel/iommu_groups").iter().any(translates) {
        found.push("devices behind an IOMMU that translates (boot with iommu.passthrough=1)".into());
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
        if driver == "vfio-pci" {
            found.push(format!("device {address}, which a process drives by itself (VFIO)"));
        } else if is_accelerator(&class) && !is_plain(&driver) {
            found.push(format!("GPU {address} ({driver})"));
        }
    }
    found
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
        let group = |number: &str, kind: &str| {
            let folder = root.path().join("sys/kernel/iommu_groups").join(number);
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join("type"), kind).expect("a file");
        };
        group("0", "identity");
        assert_eq!(untracked(&Sysroot::at(root.path())).len(), 3);
        group("1", "DMA-FQ");
        let found = untracked(&Sysroot::at(root.path()));
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found[0].contains("IOMMU") && found[1].contains("mlx5_0"), "{found:?}");
        assert!(found[2].contains("nvidia") && found[3].contains("VFIO"), "{found:?}");
    }
}
