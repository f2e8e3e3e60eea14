//! Detects a lock file on a network file system, where neither locks nor notifications are
//! reliable.

use std::path::Path;

use crate::contract::finding::Finding;

/// Returns the findings about the file system of a lock file. A local disk has none.
pub(super) fn findings(path: &Path) -> Vec<Finding> {
    kind_of(path).map(finding_for).into_iter().collect()
}

fn finding_for(kind: &'static str) -> Finding {
    Finding::new(
        "network-file-system",
        format!(
            "the lock file is on a network file system ({kind}), where file locks are not \
             reliable: use a local disk, or a server such as Redis or PostgreSQL for several \
             machines"
        ),
    )
}

#[cfg(target_os = "linux")]
fn kind_of(path: &Path) -> Option<&'static str> {
    numbers_of(path).into_iter().flatten().find_map(kind_by_number)
}

/// Returns the file system types of the file and of the directory where SQLite keeps its other
/// files. Follows links, as SQLite does.
#[cfg(target_os = "linux")]
fn numbers_of(path: &Path) -> [Option<u32>; 2] {
    let resolved = std::fs::canonicalize(path).unwrap_or_else(|_missing| path.to_owned());
    let folder = resolved.parent().filter(|folder| !folder.as_os_str().is_empty());
    [&resolved, folder.unwrap_or(Path::new("."))].map(|path| {
        let found = rustix::fs::statfs(path).ok()?;
        // Only the lower half is the documented number.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the lower half"
        )]
        Some(found.f_type as u32)
    })
}

#[cfg(not(target_os = "linux"))]
fn kind_of(_path: &Path) -> Option<&'static str> {
    None
}

/// Returns the name of a network or cluster file system by its type number from `statfs`.
#[cfg(target_os = "linux")]
fn kind_by_number(number: u32) -> Option<&'static str> {
    const KINDS: [(u32, &str); 19] = [
        (0x6969, "NFS"),
        (0x517B, "SMB"),
        (0xFF53_4D42, "SMB"),
        (0xFE53_4D42, "SMB"),
        (0x0102_1997, "9p"),
        (0x5346_414F, "AFS"),
        (0x6B41_4653, "AFS"),
        (0x00C3_6400, "Ceph"),
        (0x6573_5546, "FUSE"),
        (0x0BD0_0BD0, "Lustre"),
        (0x4750_4653, "GPFS"),
        (0x1983_0326, "BeeGFS"),
        (0x0116_1970, "GFS2"),
        (0x7461_636F, "OCFS2"),
        (0x2003_0528, "OrangeFS"),
        (0xAAD7_AAEA, "PanFS"),
        (0x7375_7245, "Coda"),
        (0x786F_4256, "vboxsf"),
        (0xBACB_ACBC, "vmhgfs"),
    ];
    KINDS.iter().find(|(known, _)| *known == number).map(|(_, kind)| *kind)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_are_recognized() {
        let table = [
            ("NFS", 0x6969),
            ("SMB", 0xFE53_4D42),
            ("9p", 0x0102_1997),
            ("AFS", 0x6B41_4653),
            ("Ceph", 0x00C3_6400),
            ("FUSE", 0x6573_5546),
            ("Lustre", 0x0BD0_0BD0),
            ("GPFS", 0x4750_4653),
            ("BeeGFS", 0x1983_0326),
            ("GFS2", 0x0116_1970),
            ("OCFS2", 0x7461_636F),
        ];
        for (kind, number) in table {
            assert_eq!(kind_by_number(number), Some(kind));
            let finding = finding_for(kind);
            assert_eq!(finding.subject(), "network-file-system");
            assert!(finding.text().contains(kind), "{finding}");
        }
        // ext4, btrfs, xfs, tmpfs, overlayfs, zfs.
        for local in [0xEF53, 0x9123_683E, 0x5846_5342, 0x0102_1994, 0x794C_7630, 0x2FC1_2FC1] {
            assert_eq!(kind_by_number(local), None, "{local:x}");
        }
    }

    #[test]
    fn links_are_followed() {
        const PROC: u32 = 0x9FA0;
        let folder = std::env::temp_dir().join(format!("syncguard-fs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("created");
        let link = folder.join("link.db");
        std::os::unix::fs::symlink("/proc/self/status", &link).expect("linked");
        assert_eq!(numbers_of(&link), [Some(PROC); 2]);
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
