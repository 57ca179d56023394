//! The description of a machine.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use crate::{
    driver::Variant,
    error::{Error, Result},
    image::Release,
    iommu::Iommu,
    kernel::Kernel,
    previrtualization::{self, Flavour},
    tsc,
};

/// The default processor: SVM with nested paging, as far as QEMU emulates it.
pub const CPU: &str = "EPYC,+svm,+npt";

/// The kernel's watchdog limit, in seconds. A kernel in Bochs takes most of a minute for the
/// checksum of a crash kernel.
const PATIENT_WATCHDOG: &str = "watchdog_thresh=60";

/// The variable that makes machines of Debian 12's cloud kernel boot a kernel with checks instead:
/// `locks`, or `memory` for KASAN as well.
const CHECKED: &str = "MERCURY_LAB_CHECKED";

/// Returns the kernel that machines of this release boot in place of the cloud kernel, if the
/// environment asks for one. The kernel is built first if it is missing.
///
/// # Errors
/// If the kernel does not build.
pub(crate) fn checked_kernel(release: Release) -> Result<Option<PathBuf>> {
    let flavour = checks(release)?;
    flavour.map(|flavour| Ok(previrtualization::build(release, flavour)?.image)).transpose()
}

/// Returns the checks that the environment asks for.
///
/// # Errors
/// If the variable has another value.
pub(crate) fn checks(release: Release) -> Result<Option<Flavour>> {
    let value = std::env::var(CHECKED).unwrap_or_default();
    let flavour = match value.as_str() {
        "" => return Ok(None),
        "locks" | "1" => Flavour::Checked,
        "memory" => Flavour::Sanitized,
        _ => return Err(Error::Host(format!("{CHECKED} is {value:?}: it may be `locks` or `memory`"))),
    };
    Ok(Some(flavour).filter(|_| release == Release::Bookworm))
}

/// The name of QEMU's program.
pub const QEMU: &str = "qemu-system-x86_64";

/// The emulator of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    /// QEMU, with an AMD processor that [`Spec::cpu`] describes.
    Qemu,
    /// Bochs, with a model of a processor that exists.
    Bochs(Model),
}

/// A processor that Bochs models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// AMD's Zen: SVM with next-RIP and flushes by address-space identifier.
    Ryzen,
    /// Intel's Core i7-2600K of 2011, without 1 GiB pages.
    SandyBridge,
    /// Intel's Core i7-4770 of 2013.
    Haswell,
    /// Intel's Core i7-7800X of 2017, with AVX-512.
    SkylakeX,
    /// Intel's Core i5-1135G7 of 2020, with control-flow enforcement and protection keys.
    TigerLake,
}

/// The vendor of a machine's processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// AMD, with SVM.
    Amd,
    /// Intel, with VMX.
    Intel,
}

impl Vendor {
    /// Returns the name of KVM's module for the vendor.
    #[must_use]
    pub fn kvm_module(self) -> &'static str {
        match self {
            Self::Amd => "kvm_amd",
            Self::Intel => "kvm_intel",
        }
    }

    /// Returns the prefix of the vendor's code in the driver and in the hypervisor.
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Amd => "svm",
            Self::Intel => "vmx",
        }
    }
}

impl Platform {
    const NAMES: [(&str, Self); 6] = [
        ("amd", Self::Qemu),
        ("bochs-amd", Self::Bochs(Model::Ryzen)),
        ("intel", Self::Bochs(Model::SkylakeX)),
        ("intel-sandybridge", Self::Bochs(Model::SandyBridge)),
        ("intel-haswell", Self::Bochs(Model::Haswell)),
        ("intel-tigerlake", Self::Bochs(Model::TigerLake)),
    ];

    /// Returns the vendor of the platform's processor.
    #[must_use]
    pub fn vendor(self) -> Vendor {
        match self {
            Self::Qemu | Self::Bochs(Model::Ryzen) => Vendor::Amd,
            Self::Bochs(_) => Vendor::Intel,
        }
    }

    /// Checks the vendor, for a test that only machines of one vendor can run.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with `reason` if the chosen platform has another vendor.
    pub fn need(vendor: Vendor, reason: &'static str) -> Result<()> {
        if Self::chosen()?.vendor() == vendor { Ok(()) } else { Err(Error::Unsupported { reason }) }
    }

    /// Returns the platform that `LAB` in the environment chooses for all machines that do not name
    /// one.
    ///
    /// # Errors
    /// If `LAB` names no platform.
    pub fn chosen() -> Result<Self> {
        std::env::var("LAB").map_or(Ok(Self::Qemu), |name| name.parse().map_err(Error::Spec))
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, platform)| platform == self).map_or("?", |(name, _)| *name);
        f.write_str(name)
    }
}

impl FromStr for Platform {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        let all = || Self::NAMES.map(|(name, _)| name).join(", ");
        found.map(|(_, platform)| *platform).ok_or_else(|| format!("LAB={name}: there are {}", all()))
    }
}

/// The bus of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// NVMe. QEMU cannot save its state: no `savevm`.
    Nvme,
    Virtio,
    /// AHCI. The cloud kernels have no driver for it.
    Ahci,
    /// USB storage, for a disk without a root file system. The cloud kernels have no driver for it.
    Usb,
}

/// A model of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nic {
    Virtio,
    /// Intel's e1000e. The cloud kernels have no driver for it. It may receive nothing after an instant
    /// (docs/limits.md).
    E1000e,
}

impl Nic {
    /// Returns QEMU's name of the model.
    #[must_use]
    pub fn model(self) -> &'static str {
        match self {
            Self::Virtio => "virtio-net-pci",
            Self::E1000e => "e1000e",
        }
    }
}

/// The first process of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// The lab's agent, which is quickest.
    Agent,
    /// systemd, with the agent as a service.
    Systemd,
}

/// The effect of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// Ends QEMU, so that a panic is seen at once.
    Ends,
    /// Starts the machine again, as on metal.
    Restarts,
}

/// A clock that counts instructions instead of time: deterministic, for one processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icount {
    /// One instruction takes a nanosecond of the machine's time.
    Exact,
    /// An instruction takes 2^shift nanoseconds, and an idle machine does not wait for wall time.
    NoSleep { shift: u8 },
}

/// A version of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qemu {
    /// The version that this host has.
    Host,
    /// The version of [`crate::emulator::newer_qemu`].
    Newer,
}

/// The destination of the serial console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// The machine's log only.
    Log,
    /// This terminal and the log, with a shell.
    Terminal,
    /// A socket and the log: see [`crate::Machine::console`].
    Socket,
}

/// The description of a machine to boot. Every machine has a serial console and the artefacts' disk
/// at `/mercury`. Its root disk is its own, and is lost with the machine.
#[derive(Clone, Debug)]
pub struct Spec {
    pub(crate) platform: Platform,
    pub(crate) kernel: Kernel,
    pub(crate) own_kernel: Option<PathBuf>,
    pub(crate) cpus: u32,
    pub(crate) max_cpus: u32,
    pub(crate) memory_mib: u32,
    pub(crate) cpu_model: String,
    pub(crate) phys_bits: Option<u8>,
    pub(crate) root_bus: Bus,
    pub(crate) disks: Vec<(Bus, u32)>,
    pub(crate) nic: Option<Nic>,
    pub(crate) iommu: Option<Iommu>,
    pub(crate) metal: bool,
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
    pub(crate) uefi_variables: bool,
    pub(crate) console: Console,
    pub(crate) boot_limit: Duration,
}

impl Spec {
    /// Describes a machine with `kernel`, two processors, 1 GiB and nothing special.
    #[must_use]
    pub fn new(kernel: Kernel) -> Self {
        Self {
            platform: Platform::chosen().unwrap_or(Platform::Qemu),
            kernel,
            own_kernel: None,
            cpus: 2,
            max_cpus: 0,
            memory_mib: 1024,
            cpu_model: CPU.to_owned(),
            phys_bits: None,
            root_bus: Bus::Nvme,
            disks: Vec::new(),
            nic: None,
            iommu: None,
            metal: false,
            icount: None,
            kernel_args: Vec::new(),
            init: Init::Agent,
            modules: Variant::Production,
            reset: Reset::Ends,
            gdb_port: None,
            wants_gdb: false,
            qemu: QEMU.to_owned(),
            // QEMU 7.2 now and then executes a breakpoint that 6.12, patching its own text, has
            // already removed: until 8.1 a page could be written while it was translated.
            qemu_version: if kernel.release() == Release::Trixie { Qemu::Newer } else { Qemu::Host },
            qemu_args: Vec::new(),
            uefi_variables: false,
            console: Console::Log,
            boot_limit: Duration::from_secs(90),
        }
    }

    /// Sets the platform, whatever `LAB` says.
    #[must_use]
    pub fn platform(mut self, platform: Platform) -> Self {
        self.platform = platform;
        self
    }

    /// Sets a kernel that was built here, with all its drivers built in, in place of Debian's. The
    /// rest of the machine is the release's.
    #[must_use]
    pub fn own_kernel(mut self, image: &Path) -> Self {
        // The emulator runs in a directory of its own.
        self.own_kernel = Some(std::path::absolute(image).unwrap_or_else(|_| image.to_owned()));
        self
    }

    /// Sets the number of processors at the start.
    #[must_use]
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets the number of processors that the machine may grow to by hotplug.
    #[must_use]
    pub fn max_cpus(mut self, cpus: u32) -> Self {
        self.max_cpus = cpus;
        self
    }

    /// Sets the size of the memory, in MiB.
    #[must_use]
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Sets another processor, in QEMU's terms: `EPYC,-svm`, `max,+la57` …
    #[must_use]
    pub fn cpu(mut self, model: &str) -> Self {
        model.clone_into(&mut self.cpu_model);
        self
    }

    /// Changes a feature of the processor: `+la57`, `-pdpe1gb`, `-svm` …
    #[must_use]
    pub fn cpu_feature(mut self, feature: &str) -> Self {
        self.cpu_model += &format!(",{feature}");
        self
    }

    /// Sets the width of physical addresses, in bits.
    #[must_use]
    pub fn phys_bits(mut self, bits: u8) -> Self {
        self.phys_bits = Some(bits);
        self
    }

    /// Sets the bus of the root disk and of the artefacts' disk.
    #[must_use]
    pub fn root_bus(mut self, bus: Bus) -> Self {
        self.root_bus = bus;
        self
    }

    /// Adds an empty disk, of a size in MiB.
    #[must_use]
    pub fn disk(mut self, bus: Bus, mib: u32) -> Self {
        self.disks.push((bus, mib));
        self
    }

    /// Adds a network card.
    #[must_use]
    pub fn nic(mut self, nic: Nic) -> Self {
        self.nic = Some(nic);
        self
    }

    /// Puts an IOMMU in front of all devices, in a QEMU whose IOMMU translates.
    #[must_use]
    pub fn iommu(mut self, iommu: Iommu) -> Self {
        self.iommu = Some(iommu);
        self.qemu_version(Qemu::Newer)
    }

    /// Gives the machine devices as bare metal has them, none of virtio's. The agent's stream is the
    /// second serial port.
    #[must_use]
    pub fn metal(mut self) -> Self {
        self.metal = true;
        self
    }

    /// Counts instructions; the machine must have one processor.
    #[must_use]
    pub fn icount(mut self, icount: Icount) -> Self {
        self.icount = Some(icount);
        self
    }

    /// Adds a word to the kernel's command line.
    #[must_use]
    pub fn kernel_arg(mut self, word: &str) -> Self {
        self.kernel_args.push(word.to_owned());
        self
    }

    /// Sets the first process.
    #[must_use]
    pub fn init(mut self, init: Init) -> Self {
        self.init = init;
        self
    }

    /// Sets the variant of the driver that `mercury` uses in the machine, by `MERCURY_MODULE`.
    #[must_use]
    pub fn modules(mut self, variant: Variant) -> Self {
        self.modules = variant;
        self
    }

    /// Sets the effect of a reset.
    #[must_use]
    pub fn reset(mut self, reset: Reset) -> Self {
        self.reset = reset;
        self
    }

    /// Opens a port for gdb on this host's loopback: see `Machine::gdb_port`.
    #[must_use]
    pub fn gdb(mut self) -> Self {
        self.wants_gdb = true;
        self
    }

    /// Sets another QEMU program.
    #[must_use]
    pub fn qemu(mut self, program: &str) -> Self {
        program.clone_into(&mut self.qemu);
        self
    }

    /// Sets another version of QEMU. QEMU is built when the machine boots, if it is missing.
    #[must_use]
    pub fn qemu_version(mut self, version: Qemu) -> Self {
        self.qemu_version = version;
        self
    }

    /// Adds an argument for QEMU, as it is.
    #[must_use]
    pub fn qemu_arg(mut self, argument: &str) -> Self {
        self.qemu_args.push(argument.to_owned());
        self
    }

    /// Adds free slots for memory of up to 4 GiB in all. The kernel uses at once what is plugged
    /// in.
    #[must_use]
    pub fn memory_slots(self) -> Self {
        self.qemu_arg("-m").qemu_arg("slots=4,maxmem=4G").kernel_arg("memhp_default_state=online")
    }

    /// Adds a DIMM of 128 MiB from the start. The firmware's memory map does not list it.
    #[must_use]
    pub fn dimm(self, id: &str) -> Self {
        Self::dimm_arguments(id).iter().fold(self, |spec, argument| spec.qemu_arg(argument))
    }

    /// Returns QEMU's arguments for a DIMM of 128 MiB.
    #[must_use]
    pub fn dimm_arguments(id: &str) -> [String; 4] {
        let memory = format!("memory-backend-ram,id={id}-memory,size=128M");
        ["-object".into(), memory, "-device".into(), format!("pc-dimm,id={id},memdev={id}-memory")]
    }

    /// Sets UEFI firmware in place of a BIOS, on QEMU.
    #[must_use]
    pub fn uefi(self) -> Self {
        self.qemu_arg("-bios").qemu_arg("/usr/share/ovmf/OVMF.fd")
    }

    /// Sets UEFI firmware in a flash of the machine's own, which keeps the firmware's variables.
    /// Without the flash, the firmware writes them to the first FAT file system that it finds.
    #[must_use]
    pub fn uefi_with_variables(mut self) -> Self {
        self.uefi_variables = true;
        self
    }

    /// Sets the destination of the console.
    #[must_use]
    pub fn console(mut self, console: Console) -> Self {
        self.console = console;
        self
    }

    /// Sets the time limit up to the agent's first word, in wall time.
    #[must_use]
    pub fn boot_limit(mut self, limit: Duration) -> Self {
        self.boot_limit = limit;
        self
    }

    /// Describes the machine in one line for people.
    #[must_use]
    pub fn summary(&self) -> String {
        let cpu = match self.platform {
            Platform::Qemu => self.cpu_model.clone(),
            bochs @ Platform::Bochs(_) => bochs.to_string(),
        };
        format!("{}, {} CPUs ({cpu}), {} MiB", self.kernel, self.cpus, self.memory_mib)
    }

    /// Refuses contradictions, each by name.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |why: &str| Err(Error::Spec(why.to_owned()));
        let cloud = matches!(self.kernel, Kernel::BookwormCloud | Kernel::TrixieCloud);
        let other = self.root_bus == Bus::Ahci
            || self.disks.iter().any(|(bus, _)| matches!(bus, Bus::Ahci | Bus::Usb));
        if self.cpus == 0 || (self.max_cpus != 0 && self.max_cpus < self.cpus) {
            return refuse("more processors at the start than it may grow to, or none");
        }
        if self.icount.is_some() && self.cpus.max(self.max_cpus) > 1 {
            return refuse("with icount a second processor never comes up");
        }
        if let Some(reason) = self.unsupported() {
            return Err(Error::Unsupported { reason });
        }
        let virtio = self.root_bus == Bus::Virtio
            || self.nic == Some(Nic::Virtio)
            || self.disks.iter().any(|(bus, _)| *bus == Bus::Virtio);
        if self.metal && virtio {
            return refuse("a machine like metal has no device of virtio's");
        }
        if self.root_bus == Bus::Usb {
            return refuse("the initramfs has no driver for USB");
        }
        if cloud && (other || self.nic == Some(Nic::E1000e)) {
            return refuse("the cloud kernels have no driver for AHCI, USB and e1000e");
        }
        if self.iommu.is_some() && self.qemu_version != Qemu::Newer {
            return refuse("this host's QEMU translates for no AMD IOMMU");
        }
        if cloud && self.iommu == Some(Iommu::Amd) {
            return refuse("the cloud kernels have no driver for AMD's IOMMU");
        }
        Ok(())
    }

    /// Returns the first wanted feature that a machine in Bochs cannot have.
    fn unsupported(&self) -> Option<&'static str> {
        let wanted = [
            (
                !self.disks.is_empty() || self.root_bus != Bus::Nvme,
                "Bochs has IDE disks only, and no further ones",
            ),
            (self.nic.is_some(), "Bochs has no network card that the lab uses"),
            (self.iommu.is_some(), "Bochs has no IOMMU"),
            (self.cpu_model != CPU || self.phys_bits.is_some(), "this is about a processor of QEMU's"),
            (self.console != Console::Log, "Bochs shows its console on no terminal"),
            (self.max_cpus != 0, "Bochs has no hotplug of processors"),
            (self.wants_gdb, "Bochs has no gdb stub for several processors"),
            (self.icount.is_some(), "this counts instructions with QEMU's icount"),
            (!self.qemu_args.is_empty() || self.uefi_variables, "this is about a device of QEMU's"),
        ];
        let found = wanted.into_iter().find(|(wanted, _)| *wanted && self.platform != Platform::Qemu);
        found.map(|(_, reason)| reason)
    }

    /// Returns the kernel's command line. `panic=-1`: a panic ends the machine at once.
    pub(crate) fn kernel_command_line(&self) -> String {
        let init = if self.init == Init::Systemd { "systemd" } else { "agent" };
        let mut words = vec![
            "console=ttyS0".to_owned(),
            "quiet".to_owned(),
            "no_timer_check".to_owned(),
            "panic=-1".to_owned(),
            format!("lab.init={init}"),
            format!("lab.host={}", self.kernel.release()),
            format!("lab.modules={}", self.modules.directory()),
        ];
        words.extend(self.clock());
        if self.metal || self.platform != Platform::Qemu {
            words.push("lab.port=ttyS1".to_owned());
        }
        if self.console == Console::Terminal {
            words.push("lab.shell=1".to_owned());
        }
        words.extend(self.iommu.and_then(Iommu::kernel_argument).map(str::to_owned));
        words.extend(self.kernel_args.iter().cloned());
        words.join(" ")
    }

    /// Returns the words about clocks.
    ///
    /// The emulated TSC is reliable; without this word the kernel would use the HPET. Bochs's later
    /// models state a wrong frequency, by which time would pass fifty times too slowly or worse. A
    /// machine that counts instructions finds its frequency for itself.
    fn clock(&self) -> Vec<String> {
        let words: &[&str] = match self.platform {
            Platform::Bochs(Model::SkylakeX | Model::TigerLake) => {
                &["tsc=unstable", "clocksource=acpi_pm", PATIENT_WATCHDOG]
            }
            Platform::Bochs(_) => &["tsc=reliable", PATIENT_WATCHDOG],
            Platform::Qemu => &["tsc=reliable"],
        };
        let frequency = (self.platform == Platform::Qemu && self.icount.is_none())
            .then(|| format!("tsc_early_khz={}", tsc::khz()));
        words.iter().map(|&word| word.to_owned()).chain(frequency).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_specs_are_refused() {
        let spec = || Spec::new(Kernel::BookwormCloud);
        assert!(spec().cpus(0).check().is_err());
        assert!(spec().cpus(4).max_cpus(2).check().is_err());
        assert!(spec().icount(Icount::Exact).check().is_err());
        assert!(spec().root_bus(Bus::Ahci).check().is_err());
        assert!(spec().nic(Nic::E1000e).check().is_err());
        assert!(spec().iommu(Iommu::Amd).check().is_err());
        assert!(spec().iommu(Iommu::Intel).qemu_version(Qemu::Host).check().is_err());
        assert!(spec().iommu(Iommu::Intel).check().is_ok());
        assert!(spec().metal().nic(Nic::Virtio).check().is_err());
        assert!(spec().metal().disk(Bus::Virtio, 64).check().is_err());
        assert!(spec().metal().disk(Bus::Nvme, 64).check().is_ok());
        assert!(spec().cpus(1).icount(Icount::Exact).check().is_ok());
    }
}
