//! The device or the tasks that kept the kernel from stopping all of them.

use super::waits::{self, Task};
use mercury_abi::code::Code;
use mercury_control::{error::Error, sysroot::Sysroot};

/// Returns the number of devices that did not stop since boot. The kernel keeps the name of the
/// last one for ever.
pub fn quiesce_failures(sysroot: &Sysroot) -> u64 {
    let folder = "sys/power/suspend_stats";
    let count = |name: &String| sysroot.text(&format!("{folder}/{name}"))?.parse::<u64>().ok();
    sysroot.names(folder).iter().filter(|name| name.starts_with("failed_")).filter_map(count).sum()
}

/// Adds the device that did not stop to an error, if the kernel names it; before,
/// [`quiesce_failures`] was `failures`. Otherwise adds the tasks that may not have come to rest.
pub fn name_culprit(error: Error, failures: u64, sysroot: &Sysroot) -> Error {
    name_one_of(error, failures, sysroot, &waits::uninterruptible)
}

fn name_one_of(mut error: Error, failures: u64, sysroot: &Sysroot, tasks: &dyn Fn() -> Vec<Task>) -> Error {
    if error.code != Some(Code::SnapshotQuiesce) {
        return error;
    }
    let stats =
        |file| sysroot.text(&format!("sys/power/suspend_stats/{file}")).filter(|text| !text.is_empty());
    if quiesce_failures(sysroot) == failures {
        name_tasks(&mut error, &tasks());
    } else if let Some(device) = stats("last_failed_dev") {
        let step = stats("last_failed_step").map(|step| format!(", at step {step}")).unwrap_or_default();
        error.message += &format!(": device {device}{step}");
        error.hint =
            Some(format!("unbind the driver of {device}, or end the programs that use it, and try again"));
    }
    error
}

fn name_tasks(error: &mut Error, tasks: &[Task]) {
    if tasks.is_empty() {
        return;
    }
    let named: Vec<_> = tasks.iter().map(ToString::to_string).collect();
    error.message +=
        &format!(": these were waiting a moment later, and may be the reason: {}", named.join("; "));
    if let Some(remedy) = tasks.iter().find_map(Task::remedy) {
        let logged = error.hint.take().map(|hint| hint + ". ").unwrap_or_default();
        error.hint = Some(format!("{logged}If it is one of these: {remedy}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_control::error::Error;
    use std::fs;

    #[test]
    fn a_device_is_named_or_else_tasks() {
        let root = tempfile::tempdir().expect("a folder");
        let stats = root.path().join("sys/power/suspend_stats");
        fs::create_dir_all(&stats).expect("a folder");
        for (file, text) in [("failed_suspend", "3\n"), ("last_failed_dev", "sda\n")] {
            fs::write(stats.join(file), text).expect("a file");
        }
        let sysroot = Sysroot::at(root.path());
        let task = || vec![waits::tests::waiting("blk_io_schedule")];
        let refused = |code| Error::refused("snapshot", code, None, [0; 2]);
        let named = |code, failures| name_one_of(refused(code), failures, &sysroot, &task);
        assert!(named(Code::SnapshotQuiesce, 2).message.ends_with(": device sda"));
        let of_tasks = named(Code::SnapshotQuiesce, 3);
        assert!(of_tasks.message.ends_with("dd (7), state D, which waits for a disk (blk_io_schedule)"));
        assert!(of_tasks.message.contains(": these were waiting a moment later, and may be the reason: dd"));
        let hint = of_tasks.hint.expect("a hint");
        assert!(hint.starts_with("`dmesg` names the task or the driver. If it is one of these: "), "{hint}");
        assert!(hint.contains("the disk is less busy"), "{hint}");
        let none = name_one_of(refused(Code::SnapshotQuiesce), 3, &sysroot, &Vec::new);
        assert_eq!(none, refused(Code::SnapshotQuiesce));
        assert_eq!(named(Code::SnapshotSwap, 2), refused(Code::SnapshotSwap));
    }
}
