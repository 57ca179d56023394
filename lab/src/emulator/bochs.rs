//! Bochs's configuration for a machine, and the disc from which the machine boots, since Bochs
//! takes no kernel on its command line.
//!
//! The disks are IDE. The root disk is copied on write into the machine's directory. The agent's
//! stream is the second serial port, which Bochs connects to a socket of the lab. Bochs treats a
//! power-off as a panic and ends. A reset starts the machine again.

use std::{fs, net::TcpListener, path::Path, process::Command};

use super::{
    AgentSocket, Files, Start,
    bochs_build::{self, Bochs},
    file,
};
use crate::{
    error::{Context, Result},
    host,
    scene::Scene,
    spec::{Model, Spec},
};

/// Number of instructions that make a second of the machine's time, whatever time they take on the
/// host. The processor's time-stamp counter counts them too.
const INSTRUCTIONS_PER_SECOND: u32 = 50_000_000;

const CONFIGURATION: &str = "bochsrc";
const DISC: &str = "boot.iso";
const LOG: &str = "bochs.log";

pub(super) fn prepare(spec: &Spec, model: Model, files: Files<'_>, scene: &Scene) -> Result<Start> {
    let bochs = bochs_build::ensure()?;
    make_disc(&bochs, spec, files, scene.dir())?;
    let listener = TcpListener::bind("127.0.0.1:0").context(|| "listen for the agent".into())?;
    let port = listener.local_addr().context(|| "listen for the agent".into())?.port();
    let text = configuration(&bochs, spec, model, files, port);
    fs::write(scene.dir().join(CONFIGURATION), text).context(|| "configure Bochs".into())?;
    Ok(Start {
        program: bochs.program(),
        arguments: ["-q", "-f", CONFIGURATION].map(str::to_owned).to_vec(),
        agent: AgentSocket::Tcp(listener),
    })
}

/// Returns true if Bochs has ended because the machine was switched off.
pub(crate) fn has_powered_off(scene: &Scene) -> bool {
    fs::read_to_string(scene.dir().join(LOG)).is_ok_and(|log| log.contains("soft power off"))
}

impl Model {
    fn name(self) -> &'static str {
        match self {
            Self::Ryzen => "ryzen",
            Self::SandyBridge => "corei7_sandy_bridge_2600k",
            Self::Haswell => "corei7_haswell_4770",
            Self::SkylakeX => "corei7_skylake_x",
            Self::TigerLake => "tigerlake",
        }
    }
}

/// Returns Bochs's configuration. Errors of the emulated machine, such as an access to a missing
/// MSR, are the guest's business and do not stop Bochs.
fn configuration(bochs: &Bochs, spec: &Spec, model: Model, files: Files<'_>, port: u16) -> String {
    let Spec { cpus, memory_mib, .. } = spec;
    let (bios, vga_bios) = (bochs.bios(), bochs.vga_bios());
    let disk = |path: &Path, name: &str| {
        format!("type=disk, mode=volatile, path=\"{}\", journal=\"{name}.redolog\"", path.display())
    };
    format!(
        "config_interface: textconfig\n\
         display_library: nogui\n\
         cpu: model={}, count={cpus}, ips={INSTRUCTIONS_PER_SECOND}, reset_on_triple_fault=1, \
         ignore_bad_msrs=1\n\
         memory: guest={memory_mib}, host={memory_mib}\n\
         romimage: file=\"{}\"\n\
         vgaromimage: file=\"{}\"\n\
         pci: enabled=1, chipset=i440fx\n\
         clock: sync=none, time0=local\n\
         ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14\n\
         ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15\n\
         ata0-master: {}\n\
         ata0-slave: {}\n\
         ata1-master: type=cdrom, path={DISC}, status=inserted\n\
         boot: cdrom\n\
         com1: enabled=1, mode=file, dev={}\n\
         com2: enabled=1, mode=socket-client, dev=127.0.0.1:{port}\n\
         speaker: enabled=0\n\
         log: {LOG}\n\
         panic: action=fatal\n\
         error: action=ignore\n\
         info: action=ignore\n\
         debug: action=ignore\n",
        model.name(),
        bios.display(),
        vga_bios.display(),
        disk(files.root_disk, "root"),
        disk(files.lab_disk, "lab"),
        file::SERIAL,
    )
}

/// Makes a disc that boots the kernel by isolinux.
fn make_disc(bochs: &Bochs, spec: &Spec, files: Files<'_>, dir: &Path) -> Result<()> {
    let tree = dir.join("disc");
    let what = || "make the disc to boot from".to_owned();
    fs::create_dir(&tree).context(what)?;
    for (from, name) in bochs.boot_loader() {
        fs::copy(from, tree.join(name)).context(what)?;
    }
    let line = spec.kernel_command_line();
    let menu = format!("DEFAULT linux\nLABEL linux\n\tKERNEL vmlinuz\n\tINITRD initramfs\n\tAPPEND {line}\n");
    fs::write(tree.join("isolinux.cfg"), menu).context(what)?;
    // The disc names these files; they are not copied first.
    let graft = |name: &str, path: &Path| format!("{name}={}", path.display());
    let mut xorriso: Command = bochs.xorriso();
    xorriso.args(["-as", "mkisofs", "-quiet", "-graft-points", "-o"]).arg(dir.join(DISC));
    xorriso.args(["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4"]);
    xorriso.arg("-boot-info-table").arg(&tree);
    xorriso.args([graft("vmlinuz", files.vmlinuz), graft("initramfs", files.initramfs)]);
    host::run("making a disc", "xorriso", &mut xorriso)
}
