//! The kernel's command line of a restore environment: made from the running kernel's line, and read
//! by the environment's first process.

use crate::{Target, input::outcome};
use mercury_relocation::{
    migrate::pause::{self, Pause},
    restore::{
        environment::{Purpose, command_line_after},
        init::Task,
    },
};

pub const TARGET: Target = Target {
    name: "command-line",
    run,
    seeds: || {
        [
            "BOOT_IMAGE=/vmlinuz root=/dev/vda1 ro quiet console=ttyS0 maxcpus=0 intel_iommu=on",
            "mem=4G memmap=2G!4G rd.break systemd.unit=rescue.target -- init=/bin/sh",
            "mercury.restore=/dev/vdb mercury.force-disks mercury.give-up",
            "mercury.receive mercury.pause-at=Arrived mercury.eat-at=Asking:2",
        ]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
    },
};

fn run(input: &[u8]) -> u64 {
    let running = String::from_utf8_lossy(input);
    let words = vec!["mercury.restore=/dev/vdb".to_owned(), "mercury.force-disks".to_owned()];
    let purpose = Purpose { words, ..Purpose::default() };
    let line = command_line_after(&running, &purpose, 96);
    let (read, made) = (Task::of(&running), Task::of(&line));
    assert!(line.ends_with(" mercury.restore=/dev/vdb mercury.force-disks"), "{line:?}");
    assert!(made.force_disks && made.image.is_some(), "{line:?}");
    if !running.contains("mercury.") {
        let expected = Task { image: Some("/dev/vdb"), receives: false, gives_up: false, force_disks: true };
        assert_eq!(made, expected, "{line:?}");
    }
    assert_eq!(line.split_whitespace().filter(|word| word.starts_with("mem=")).count(), 1, "{line:?}");
    let mut pause = Pause::of_command_line(&running, pause::WORD);
    let _ = pause.reached("Arrived");
    let words = line.split_whitespace().count().min(30);
    let image = read.image.is_some();
    outcome(&format!("{image}{}{}{}{}", read.receives, read.gives_up, read.force_disks, "x".repeat(words)))
}
