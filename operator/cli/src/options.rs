//! The command line's arguments as options of the work.

use crate::args::{CheckpointArgs, MarkArgs, MergeArgs, MigrateArgs, ReceiveArgs, RestoreArgs, SnapshotArgs};
use mercury_relocation::options::{
    CheckpointOptions, MarkOptions, MergeOptions, MigrateOptions, ReceiveOptions, RestoreOptions,
    SnapshotOptions,
};

impl From<&CheckpointArgs> for CheckpointOptions {
    fn from(args: &CheckpointArgs) -> Self {
        Self {
            image: args.image.clone(),
            poweroff: args.poweroff,
            no_fence: args.no_fence,
            hook: args.hook.clone(),
            pool: args.pool,
            every: args.every,
            keep: args.keep,
            incremental: args.incremental.clone(),
            full_every: args.full_every,
            overwrite: args.overwrite,
            force_devices: args.force_devices,
            force_offline: args.force_offline,
            hashes: args.hashes.clone(),
            level: args.level,
            module: args.module.module.clone(),
        }
    }
}

impl From<&SnapshotArgs> for SnapshotOptions {
    fn from(args: &SnapshotArgs) -> Self {
        Self {
            pool: args.pool,
            drop: args.drop,
            hook: args.hook.clone(),
            put_back: args.put_back.clone(),
            force_disks: args.force_disks,
            force_devices: args.force_devices,
            compare: args.compare,
            module: args.module.module.clone(),
        }
    }
}

impl From<&RestoreArgs> for RestoreOptions {
    fn from(args: &RestoreArgs) -> Self {
        Self {
            image: args.image.clone(),
            prepare: args.prepare.clone(),
            boot_menu: args.boot_menu,
            memory: args.memory,
            here: args.here,
            force_disks: args.force_disks,
            module: args.module.module.clone(),
        }
    }
}

impl From<&ReceiveArgs> for ReceiveOptions {
    fn from(args: &ReceiveArgs) -> Self {
        Self {
            listen: args.listen,
            prepare: args.prepare.clone(),
            lifetime: args.lifetime,
            delay: args.delay,
            hold_for_ever: args.hold_for_ever,
            disk: args.disk.clone(),
            force_disk: args.force_disk,
            memory: args.memory,
            here: args.here,
            module: args.module.module.clone(),
        }
    }
}

impl From<&MergeArgs> for MergeOptions {
    fn from(args: &MergeArgs) -> Self {
        Self {
            out: args.out.clone(),
            images: args.images.clone(),
            overwrite: args.overwrite,
            level: args.level,
        }
    }
}

impl From<&MarkArgs> for MarkOptions {
    fn from(args: &MarkArgs) -> Self {
        Self {
            clear: args.clear,
            prepare: args.prepare.clone(),
            at_boot: args.at_boot,
            initramfs: args.initramfs.clone(),
        }
    }
}

impl From<&MigrateArgs> for MigrateOptions {
    fn from(args: &MigrateArgs) -> Self {
        Self {
            host: args.host.clone(),
            key: args.key.clone(),
            dry_run: args.dry_run,
            max_downtime: args.max_downtime,
            or_give_up: args.or_give_up,
            rounds: args.rounds,
            max_throttle: args.max_throttle,
            bandwidth: args.bandwidth,
            streams: args.streams,
            congestion_control: args.congestion_control.clone(),
            pool: args.pool,
            with_disk: args.with_disk.clone(),
            force_devices: args.force_devices,
            without_mark: args.without_mark,
            level: args.level,
            hash: args.hash,
            verify_log: args.verify_log,
            pause_at: args.pause_at.clone(),
            verify_instant: args.verify_instant,
            module: args.module.module.clone(),
        }
    }
}
