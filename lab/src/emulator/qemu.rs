//! QEMU's command line for a machine. `newer_qemu` is another version of QEMU, and `qmp` its
//! monitor.

use std::{fs, process::Command};

use super::{AgentSocket, Files, Start, file, newer_qemu, repaired_qemu};
use crate::{
    disks::Disk,
    error::{Context, Result},
    host,
    iommu::Iommu,
    scene::Scene,
    spec::{Bus, Console, Icount, QEMU, Qemu, Reset, Spec},
};

/// UEFI's firmware, and its initial variables.
const UEFI: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const UEFI_VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

/// Makes the machine's disks. Returns the command to start.
///
/// # Errors
/// If a disk or the machine's QEMU cannot be made.
pub(super) fn prepare(spec: &Spec, files: Files<'_>, scene: &Scene) -> Result<Start> {
    make_overlay(scene, file::ROOT, &["-F", "raw", "-b", &files.root_disk.to_string_lossy()])?;
    for (index, (_, mib)) in spec.disks.iter().enumerate() {
        make_overlay(scene, &file::disk(index), &[&format!("{mib}M")])?;
    }
    if spec.uefi_variables {
        // A raw copy: a layer of qcow2 would lose in a power cut where it has put the firmware's
        // writes.
        let variables = scene.dir().join(file::VARIABLES);
        fs::copy(UEFI_VARIABLES, &variables).context(|| format!("write {}", variables.display()))?;
    }
    start(spec, files)
}

/// Returns the command to start with disks that exist.
///
/// # Errors
/// If the machine's QEMU cannot be made.
pub(super) fn start(spec: &Spec, files: Files<'_>) -> Result<Start> {
    let program = match spec.qemu_version {
        Qemu::Newer => newer_qemu::ensure()?,
        Qemu::Host if spec.qemu == QEMU => repaired_qemu::ensure(QEMU)?,
        Qemu::Host => spec.qemu.clone().into(),
    };
    Ok(Start { program, arguments: arguments(spec, files), agent: AgentSocket::Unix(file::AGENT) })
}

fn make_overlay(scene: &Scene, name: &str, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]);
    let (options, size): (Vec<&str>, Vec<&str>) =
        if arguments.len() > 1 { (arguments.to_vec(), vec![]) } else { (vec![], arguments.to_vec()) };
    command.args(options).arg(scene.dir().join(name)).args(size);
    host::run("making a disk", "qemu-img", &mut command)
}

fn arguments(spec: &Spec, files: Files<'_>) -> Vec<String> {
    let mut args = Arguments::default();
    processors(&mut args, spec);
    args.0.extend(spec.iommu.into_iter().flat_map(Iommu::arguments));
    boot_and_disks(&mut args, spec, files);
    channels(&mut args, spec);
    if spec.uefi_variables {
        args.add("-drive", &format!("if=pflash,format=raw,readonly=on,file={UEFI}"));
        args.add("-drive", &format!("if=pflash,format=raw,file={}", file::VARIABLES));
    }
    if let Some(nic) = spec.nic {
        args.add("-netdev", "user,id=net0");
        args.add("-device", &format!("{},netdev=net0,romfile=", nic.model()));
    }
    if spec.reset == Reset::Ends {
        args.flag("-no-reboot");
    }
    // QEMU also ends at a triple fault, and prints nothing without this option.
    args.add("-d", "cpu_reset");
    args.add("-D", file::RESETS);
    if let Some(port) = spec.gdb_port {
        args.add("-gdb", &format!("tcp:127.0.0.1:{port}"));
    }
    args.0.extend(spec.qemu_args.iter().cloned());
    args.0
}

#[derive(Default)]
struct Arguments(Vec<String>);

impl Arguments {
    fn flag(&mut self, flag: &str) {
        self.0.push(flag.to_owned());
    }

    fn add(&mut self, flag: &str, value: &str) {
        self.flag(flag);
        self.flag(value);
    }
}

fn processors(args: &mut Arguments, spec: &Spec) {
    args.flag("-nodefaults");
    args.add("-display", "none");
    args.add("-machine", "q35");
    let threads = if spec.icount.is_some() { "single" } else { "multi" };
    args.add("-accel", &format!("tcg,thread={threads}"));
    let width = spec.phys_bits.map(|bits| format!(",phys-bits={bits}")).unwrap_or_default();
    args.add("-cpu", &format!("{}{width}", spec.cpu_model));
    let most = spec.cpus.max(spec.max_cpus);
    args.add("-smp", &format!("{},maxcpus={most}", spec.cpus));
    args.add("-m", &format!("{}M", spec.memory_mib));
    match spec.icount {
        Some(Icount::Exact) => args.add("-icount", "shift=0"),
        Some(Icount::NoSleep { shift }) => args.add("-icount", &format!("shift={shift},sleep=off")),
        None => {}
    }
}

fn boot_and_disks(args: &mut Arguments, spec: &Spec, files: Files<'_>) {
    args.add("-kernel", &files.vmlinuz.to_string_lossy());
    args.add("-initrd", &files.initramfs.to_string_lossy());
    args.add("-append", &spec.kernel_command_line());
    if uses_ahci(spec) {
        args.add("-device", "ahci,id=sata");
    }
    if spec.disks.iter().any(|(bus, _)| *bus == Bus::Usb) {
        args.add("-device", "qemu-xhci");
    }
    disk(args, spec.root_bus, &Disk::Root.id(), &format!("file={},format=qcow2,cache=unsafe", file::ROOT));
    let lab = format!("file={},format=raw,read-only=on", files.lab_disk.to_string_lossy().replace(',', ",,"));
    // AHCI disks cannot be read-only.
    let lab_bus = match spec.root_bus {
        Bus::Ahci if spec.metal => Bus::Nvme,
        Bus::Ahci => Bus::Virtio,
        bus => bus,
    };
    disk(args, lab_bus, "lab", &lab);
    for (index, (bus, _)) in spec.disks.iter().enumerate() {
        let backing = format!("file={},format=qcow2,cache=unsafe", file::disk(index));
        disk(args, *bus, &Disk::Extra(index).id(), &backing);
    }
}

fn uses_ahci(spec: &Spec) -> bool {
    spec.root_bus == Bus::Ahci || spec.disks.iter().any(|(bus, _)| *bus == Bus::Ahci)
}

fn disk(args: &mut Arguments, bus: Bus, id: &str, backing: &str) {
    args.add("-drive", &format!("if=none,id={id},{backing}"));
    let device = match bus {
        Bus::Nvme => "nvme",
        Bus::Virtio => "virtio-blk-pci",
        // Each disk takes the next free port of the controller.
        Bus::Ahci => "ide-hd",
        Bus::Usb => "usb-storage",
    };
    args.add("-device", &format!("{device},drive={id},serial=mercury-{id}"));
}

fn channels(args: &mut Arguments, spec: &Spec) {
    let log = format!("logfile={},logappend=on", file::SERIAL);
    match spec.console {
        Console::Log => args.add("-chardev", &format!("null,id=console,{log}")),
        Console::Terminal => args.add("-chardev", &format!("stdio,id=console,signal=off,{log}")),
        Console::Socket => {
            let socket = format!("socket,id=console,path={},server=on,wait=off,{log}", file::CONSOLE);
            args.add("-chardev", &socket);
        }
    }
    args.add("-serial", "chardev:console");
    args.add("-chardev", &format!("socket,id=agent,path={},server=on,wait=off", file::AGENT));
    if spec.metal {
        args.add("-serial", "chardev:agent");
    } else {
        args.add("-device", "virtio-serial-pci");
        let port = mercury_lab_agent::PORT_NAME;
        args.add("-device", &format!("virtserialport,chardev=agent,name={port}"));
    }
    args.add("-chardev", &format!("socket,id=qmp,path={},server=on,wait=off", file::MONITOR));
    args.add("-mon", "chardev=qmp,mode=control");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::spec::Nic;
    use crate::{Kernel, Variant};

    fn line(spec: &Spec) -> String {
        let [vmlinuz, initramfs, root_disk, lab_disk] = ["/k", "/i", "/r", "/a,b"].map(Path::new);
        arguments(spec, Files { vmlinuz, initramfs, root_disk, lab_disk }).join(" ")
    }

    #[test]
    fn a_plain_machine() {
        let line = line(&Spec::new(Kernel::BookwormCloud));
        for part in
            ["-cpu EPYC,+svm,+npt ", "-smp 2,maxcpus=2", "-m 1024M", "thread=multi", "-no-reboot", "/a,,b"]
        {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("-netdev") && !line.contains("-gdb") && !line.contains("-icount"));
    }

    #[test]
    fn a_machine_like_metal_has_no_virtio() {
        let spec = Spec::new(Kernel::BookwormGeneric).metal().root_bus(Bus::Ahci).nic(Nic::E1000e);
        let line = line(&spec.disk(Bus::Nvme, 64));
        for part in ["-serial chardev:console ", "-serial chardev:agent ", "nvme,drive=lab", "lab.port=ttyS1"]
        {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("virt"), "{line}");
    }

    #[test]
    fn the_spec_reaches_qemu_s_arguments() {
        let spec = Spec::new(Kernel::TrixieGeneric)
            .cpus(1)
            .cpu_feature("-pdpe1gb")
            .phys_bits(46)
            .nic(Nic::E1000e)
            .disk(Bus::Ahci, 64)
            .disk(Bus::Usb, 64)
            .icount(Icount::NoSleep { shift: 3 })
            .kernel_arg("nokaslr")
            .reset(Reset::Restarts)
            .modules(Variant::Faults)
            .iommu(Iommu::Intel)
            .uefi_with_variables()
            .qemu_arg("-S");
        let line = line(&spec);
        for part in [
            "EPYC,+svm,+npt,-pdpe1gb,phys-bits=46",
            "e1000e,netdev",
            "ide-hd,drive=disk0",
            "qemu-xhci -",
            "usb-storage,drive=disk1",
            "shift=3,sleep=off",
            "intel-iommu,intremap=on",
            "iommu_platform=on",
            "intel_iommu=on nokaslr",
            "lab.modules=modules-faults",
            "if=pflash,format=raw,file=variables.img",
            " -S",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("-no-reboot"));
    }
}
