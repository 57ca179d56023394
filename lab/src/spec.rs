//! The description of a machine, and the QEMU command line that it comes to.

use std::{path::Path, time::Duration};

use crate::{
    driver::Variant,
    error::{Error, Result},
    image::Release,
    kernel::Kernel,
};

/// The processor unless a machine asks for another: SVM with nested paging, as far as QEMU emulates it.
pub const CPU: &str = "EPYC,+svm,+npt";

/// The emulator's name.
pub(crate) const QEMU: &str = "qemu-system-x86_64";

/// What a disk hangs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// NVMe. QEMU cannot save its state: no `savevm`.
    Nvme,
    /// virtio-blk.
    Virtio,
    /// AHCI. The cloud kernels have no driver for it.
    Ahci,
}

/// A network card on QEMU's user network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nic {
    /// virtio-net.
    Virtio,
    /// Intel's e1000e. The cloud kernels have no driver for it.
    E1000e,
}

/// What runs as the first process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// The lab's agent: quickest.
    Agent,
    /// systemd, with the agent as a service.
    Systemd,
}

/// What a reset does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// Ends QEMU: a panic is then seen at once.
    Ends,
    /// Starts the machine again, as on metal.
    Restarts,
}

/// Counting instructions instead of time: deterministic, for one processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icount {
    /// One instruction takes a nanosecond of the machine's time.
    Exact,
    /// 2^shift nanoseconds an instruction, and an idle machine does not wait for the wall's time.
    NoSleep {
        /// The power of two.
        shift: u8,
    },
}

/// The emulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qemu {
    /// The one that this host has.
    Host,
    /// See [`crate::newer_qemu`].
    Newer,
}

/// Where the serial console goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// Into the machine's log only.
    Log,
    /// To this terminal as well, with a shell on it.
    Terminal,
}

/// A machine to be booted. All have a serial console, a root disk that is theirs alone and lost with
/// them, and the artefacts' disk at `/mercury`.
#[derive(Clone, Debug)]
pub struct Spec {
    pub(crate) kernel: Kernel,
    pub(crate) cpus: u32,
    pub(crate) max_cpus: u32,
    pub(crate) memory_mib: u32,
    pub(crate) cpu_model: String,
    pub(crate) phys_bits: Option<u8>,
    pub(crate) root_bus: Bus,
    pub(crate) disks: Vec<(Bus, u32)>,
    pub(crate) nic: Option<Nic>,
    pub(crate) icount: Option<Icount>,
    pub(crate) kernel_args: Vec<String>,
    pub(crate) init: Init,
    pub(crate) modules: Variant,
    pub(crate) reset: Reset,
    pub(crate) gdb_port: Option<u16>,
    pub(crate) wants_gdb: bool,
    pub(crate) qemu: String,
    pub(crate) qemu_version: Qemu,
    pub(crate) qemu_args: Vec<String>,
    pub(crate) console: Console,
    pub(crate) boot_limit: Duration,
}

impl Spec {
    /// A machine with `kernel`, two processors, 1 GiB and nothing special.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        Self {
            kernel,
            cpus: 2,
            max_cpus: 0,
            memory_mib: 1024,
            cpu_model: CPU.to_owned(),
            phys_bits: None,
            root_bus: Bus::Nvme,
            disks: Vec::new(),
            nic: None,
            icount: None,
            kernel_args: Vec::new(),
            init: Init::Agent,
            modules: Variant::Production,
            reset: Reset::Ends,
            gdb_port: None,
            wants_gdb: false,
            qemu: QEMU.to_owned(),
            // 7.2 now and then executes a breakpoint that 6.12, patching its own text, has taken away
            // again: a page could be written while it was translated, until 8.1.
            qemu_version: if kernel.release() == Release::Trixie { Qemu::Newer } else { Qemu::Host },
            qemu_args: Vec::new(),
            console: Console::Log,
            boot_limit: Duration::from_secs(90),
        }
    }

    /// Processors at the start.
    #[must_use]
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Processors that it may grow to by hotplug.
    #[must_use]
    pub fn max_cpus(mut self, cpus: u32) -> Self {
        self.max_cpus = cpus;
        self
    }

    /// Memory, in MiB.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Another processor, in QEMU's words: `EPYC,-svm`, `max,+la57` …
    #[must_use]
    pub fn cpu(mut self, model: &str) -> Self {
        model.clone_into(&mut self.cpu_model);
        self
    }

    /// Changes of the processor's features: `+la57`, `-pdpe1gb`, `-svm` …
    #[must_use]
    pub fn cpu_feature(mut self, feature: &str) -> Self {
        self.cpu_model += &format!(",{feature}");
        self
    }

    /// Width of physical addresses, in bits.
    #[must_use]
    pub fn phys_bits(mut self, bits: u8) -> Self {
        self.phys_bits = Some(bits);
        self
    }

    /// The bus of the root disk and of the artefacts' disk.
    #[must_use]
    pub fn root_bus(mut self, bus: Bus) -> Self {
        self.root_bus = bus;
        self
    }

    /// One more disk, empty, of a size in MiB.
    #[must_use]
    pub fn disk(mut self, bus: Bus, mib: u32) -> Self {
        self.disks.push((bus, mib));
        self
    }

    /// A network card.
    #[must_use]
    pub fn nic(mut self, nic: Nic) -> Self {
        self.nic = Some(nic);
        self
    }

    /// Counts instructions; the machine must have one processor.
    #[must_use]
    pub fn icount(mut self, icount: Icount) -> Self {
        self.icount = Some(icount);
        self
    }

    /// One more word on the kernel's command line.
    #[must_use]
    pub fn kernel_arg(mut self, word: &str) -> Self {
        self.kernel_args.push(word.to_owned());
        self
    }

    /// What runs as the first process.
    #[must_use]
    pub fn init(mut self, init: Init) -> Self {
        self.init = init;
        self
    }

    /// Which variant of the driver `mercury` uses there, by `MERCURY_MODULE`.
    #[must_use]
    pub fn modules(mut self, variant: Variant) -> Self {
        self.modules = variant;
        self
    }

    /// What a reset does.
    #[must_use]
    pub fn reset(mut self, reset: Reset) -> Self {
        self.reset = reset;
        self
    }

    /// A port for gdb on this host's loopback: see `Machine::gdb_port`.
    #[must_use]
    pub fn gdb(mut self) -> Self {
        self.wants_gdb = true;
        self
    }

    /// Another QEMU.
    #[must_use]
    pub fn qemu(mut self, program: &str) -> Self {
        program.clone_into(&mut self.qemu);
        self
    }

    /// Another version of QEMU; it is made when the machine boots, if it is not there.
    #[must_use]
    pub fn qemu_version(mut self, version: Qemu) -> Self {
        self.qemu_version = version;
        self
    }

    /// One more argument for QEMU, as it is.
    #[must_use]
    pub fn qemu_arg(mut self, argument: &str) -> Self {
        self.qemu_args.push(argument.to_owned());
        self
    }

    /// Where the console goes.
    #[must_use]
    pub fn console(mut self, console: Console) -> Self {
        self.console = console;
        self
    }

    /// How long the way to the agent's first word may take, in wall time.
    #[must_use]
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// One line for people.
    #[must_use]
    pub fn summary(&self) -> String {
        format!("{}, {} CPUs ({}), {} MiB", self.kernel, self.cpus, self.cpu_model, self.memory_mib)
    }

    /// Refuses what cannot work, by name.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Spec(why.to_owned()));
        let cloud = matches!(self.kernel, Kernel::BookwormCloud | Kernel::TrixieCloud);
        let ahci = self.root_bus == Bus::Ahci || self.disks.iter().any(|(bus, _)| *bus == Bus::Ahci);
        if self.cpus == 0 || (self.max_cpus != 0 && self.max_cpus < self.cpus) {
            return refuse("more processors at the start than it may grow to, or none");
        }
        if self.icount.is_some() && self.cpus.max(self.max_cpus) > 1 {
            return refuse("with icount a second processor never comes up");
        }
        if cloud && (ahci || self.nic == Some(Nic::E1000e)) {
            return refuse("the cloud kernels have no driver for AHCI and e1000e");
        }
        Ok(())
    }
}

/// The files that a machine is booted from.
#[derive(Clone, Debug)]
pub(crate) struct Files<'a> {
    pub vmlinuz: &'a Path,
    pub initramfs: &'a Path,
    pub lab_disk: &'a Path,
}

/// Names of a machine's own files, in its directory, which is QEMU's working directory.
pub(crate) mod file {
    pub const ROOT: &str = "root.qcow2";
    pub const SERIAL: &str = "serial.log";
    pub const AGENT: &str = "agent.sock";
    pub const MONITOR: &str = "qmp.sock";

    pub fn disk(index: usize) -> String {
        format!("disk{index}.qcow2")
    }
}

/// QEMU's arguments for a machine.
pub(crate) fn qemu_arguments(spec: &Spec, files: &Files<'_>) -> Vec<String> {
    let mut args = Arguments::default();
    processors(&mut args, spec);
    boot_and_disks(&mut args, spec, files);
    channels(&mut args, spec);
    if let Some(nic) = spec.nic {
        let model = if nic == Nic::Virtio { "virtio-net-pci" } else { "e1000e" };
        args.add("-netdev", "user,id=net0");
        args.add("-device", &format!("{model},netdev=net0,romfile="));
    }
    if spec.reset == Reset::Ends {
        args.flag("-no-reboot");
    }
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

fn boot_and_disks(args: &mut Arguments, spec: &Spec, files: &Files<'_>) {
    args.add("-kernel", &files.vmlinuz.to_string_lossy());
    args.add("-initrd", &files.initramfs.to_string_lossy());
    args.add("-append", &kernel_command_line(spec));
    if uses_ahci(spec) {
        args.add("-device", "ahci,id=sata");
    }
    disk(args, spec.root_bus, "root", &format!("file={},format=qcow2,cache=unsafe", file::ROOT));
    let lab = format!("file={},format=raw,read-only=on", files.lab_disk.to_string_lossy().replace(',', ",,"));
    // AHCI's disks cannot be read-only.
    let lab_bus = if spec.root_bus == Bus::Ahci { Bus::Virtio } else { spec.root_bus };
    disk(args, lab_bus, "lab", &lab);
    for (index, (bus, _)) in spec.disks.iter().enumerate() {
        let backing = format!("file={},format=qcow2,cache=unsafe", file::disk(index));
        disk(args, *bus, &format!("disk{index}"), &backing);
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
        // Each takes the next free port of the controller.
        Bus::Ahci => "ide-hd",
    };
    args.add("-device", &format!("{device},drive={id},serial=mercury-{id}"));
}

fn channels(args: &mut Arguments, spec: &Spec) {
    let log = format!("logfile={},logappend=on", file::SERIAL);
    match spec.console {
        Console::Log => args.add("-chardev", &format!("null,id=console,{log}")),
        Console::Terminal => args.add("-chardev", &format!("stdio,id=console,signal=off,{log}")),
    }
    args.add("-serial", "chardev:console");
    args.add("-chardev", &format!("socket,id=agent,path={},server=on,wait=off", file::AGENT));
    args.add("-device", "virtio-serial-pci");
    let port = mercury_lab_agent::PORT_NAME;
    args.add("-device", &format!("virtserialport,chardev=agent,name={port}"));
    args.add("-chardev", &format!("socket,id=qmp,path={},server=on,wait=off", file::MONITOR));
    args.add("-mon", "chardev=qmp,mode=control");
}

/// `tsc=reliable`: the emulated TSC is, and without it the kernel would use the HPET. `panic=-1`: a
/// panic ends the machine at once.
fn kernel_command_line(spec: &Spec) -> String {
    let init = if spec.init == Init::Systemd { "systemd" } else { "agent" };
    let mut words = vec![
        "console=ttyS0".to_owned(),
        "quiet".to_owned(),
        "tsc=reliable".to_owned(),
        "no_timer_check".to_owned(),
        "panic=-1".to_owned(),
        format!("lab.init={init}"),
        format!("lab.host={}", spec.kernel.release()),
        format!("lab.modules={}", spec.modules.directory()),
    ];
    if spec.console == Console::Terminal {
        words.push("lab.shell=1".to_owned());
    }
    words.extend(spec.kernel_args.iter().cloned());
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(spec: &Spec) -> String {
        let files =
            Files { vmlinuz: Path::new("/k"), initramfs: Path::new("/i"), lab_disk: Path::new("/a,b") };
        qemu_arguments(spec, &files).join(" ")
    }

    #[test]
    fn a_plain_machine() {
        let line = arguments(&Spec::new(Kernel::BookwormCloud));
        for part in
            ["-cpu EPYC,+svm,+npt ", "-smp 2,maxcpus=2", "-m 1024M", "thread=multi", "-no-reboot", "/a,,b"]
        {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("-netdev") && !line.contains("-gdb") && !line.contains("-icount"));
    }

    #[test]
    fn what_is_asked_for_reaches_qemu() {
        let spec = Spec::new(Kernel::TrixieGeneric)
            .cpus(1)
            .cpu_feature("-pdpe1gb")
            .phys_bits(46)
            .nic(Nic::E1000e)
            .disk(Bus::Ahci, 64)
            .icount(Icount::NoSleep { shift: 3 })
            .kernel_arg("nokaslr")
            .reset(Reset::Restarts)
            .modules(Variant::Faults)
            .qemu_arg("-S");
        let line = arguments(&spec);
        for part in [
            "EPYC,+svm,+npt,-pdpe1gb,phys-bits=46",
            "e1000e,netdev",
            "ide-hd,drive=disk0",
            "shift=3,sleep=off",
            "nokaslr",
            "lab.modules=modules-faults",
            " -S",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        assert!(!line.contains("-no-reboot"));
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let spec = || Spec::new(Kernel::BookwormCloud);
        assert!(spec().cpus(0).check().is_err());
        assert!(spec().cpus(4).max_cpus(2).check().is_err());
        assert!(spec().icount(Icount::Exact).check().is_err());
        assert!(spec().root_bus(Bus::Ahci).check().is_err());
        assert!(spec().nic(Nic::E1000e).check().is_err());
        assert!(spec().cpus(1).icount(Icount::Exact).check().is_ok());
    }
}
