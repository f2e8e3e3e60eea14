//! Which server the Redis backend chooses when nodes disagree or cannot serve.
#![cfg(feature = "redis")]

mod redis_fake;
mod servers;

use std::time::Duration;

use redis_fake::FakeRedis;
use servers::{cycle, eventually};
use syncguard::redis::RedisConfig;
use syncguard::{ErrorCode, RedisBackend};
use test_support::{RedisCluster, RedisOptions, RedisServer};

async fn connect(url: &str) -> syncguard::Result<RedisBackend> {
    RedisBackend::connect(RedisConfig::from_url(url).expect("a URL")).await
}

fn has_lock_data(server: &RedisServer) -> bool {
    server.cli(&["EXISTS", "syncguard:fence:syncguard:k"]).contains('1')
}

/// The first sentinel in the URL is isolated with the old primary, which still accepts writes.
#[tokio::test(flavor = "multi_thread")]
async fn an_isolated_sentinel_does_not_choose_the_primary() {
    let Some(old) = RedisServer::start(&RedisOptions::default()) else { return };
    let new = RedisServer::start(&RedisOptions::default()).expect("installed");
    let (cut_off, current) = (FakeRedis::start().await, FakeRedis::start().await);
    cut_off.names_primary(old.port(), 3, "master");
    current.names_primary(new.port(), 4, "master");
    let url = format!(
        "redis+sentinel://127.0.0.1:{},127.0.0.1:{}/shop/0",
        cut_off.port(),
        current.port()
    );
    for _ in 0..5 {
        let backend = connect(&url).await.expect("connects");
        cycle(&backend, "k").await.expect("works");
    }
    assert!(has_lock_data(&new), "the new primary has the locks");
    assert!(!has_lock_data(&old), "the old primary has none");
    // The others agree that there is no primary now; the isolated sentinel does not count.
    current.names_primary(old.port(), 3, "master,s_down,o_down");
    let error = connect(&url).await.expect_err("no primary");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
    assert!(!error.may_have_taken_effect());
}

/// The first node in the URL is isolated: it still reports that a dead node owns our slot.
#[tokio::test(flavor = "multi_thread")]
async fn an_isolated_node_does_not_choose_the_node_in_charge() {
    let Some(cluster) = RedisCluster::start(0) else { return };
    let dead = {
        let server = RedisServer::start(&RedisOptions::default()).expect("installed");
        server.port()
    };
    let cut_off = FakeRedis::start().await;
    cut_off.names_node(dead, 1, "fail");
    let url = cluster.url("prefix=%7Blocks%7D");
    let url = url.replace("://", &format!("://127.0.0.1:{},", cut_off.port()));
    for _ in 0..5 {
        let backend = connect(&url).await.expect("connects");
        cycle(&backend, "k").await.expect("works");
    }
    // It does not count even if it is the only one.
    let url = format!("redis+cluster://127.0.0.1:{}?prefix=%7Blocks%7D", cut_off.port());
    let error = connect(&url).await.expect_err("down");
    assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{error:?}");
}

/// A primary that cannot serve, because it has lost its replicas or its own primary, or because its
/// part of the Cluster is down, is replaced once the sentinels name another one.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_serve_is_not_kept() {
    let Some(new) = RedisServer::start(&RedisOptions::default()) else { return };
    for code in ["NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "READONLY"] {
        let (sentinel, old) = (FakeRedis::start().await, FakeRedis::start().await);
        old.answer("ROLE", "*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n");
        old.answer("EVALSHA", format!("-{code} not now\r\n"));
        sentinel.names_primary(old.port(), 3, "master");
        let url = format!("redis+sentinel://127.0.0.1:{}/shop/0", sentinel.port());
        let backend = connect(&url).await.expect("connects");
        // No other server is in charge yet: calls fail, and not every call asks the sentinels.
        for _ in 0..20 {
            let error = cycle(&backend, "k").await.expect_err("it cannot serve");
            assert_eq!(error.code(), ErrorCode::ServiceUnavailable, "{code}: {error:?}");
            assert!(!error.may_have_taken_effect(), "{code}");
        }
        if code != "READONLY" {
            let asked = sentinel.count("SENTINEL MASTERS");
            assert!(asked < 20, "{code}: asked {asked} times");
        }
        sentinel.names_primary(new.port(), 4, "master");
        eventually(code, async || cycle(&backend, "k").await.is_ok()).await;
    }
}

/// A user who may not ask for the state of the Cluster can still use it.
#[tokio::test(flavor = "multi_thread")]
async fn the_state_of_a_cluster_need_not_be_readable() {
    let Some(server) = RedisServer::start(&RedisOptions::default()) else { return };
    let node = FakeRedis::start().await;
    node.names_node(server.port(), 1, "ok");
    node.answer("CLUSTER INFO", "-NOPERM not for you\r\n");
    let url = format!("redis+cluster://127.0.0.1:{}?prefix=%7Blocks%7D", node.port());
    let config =
        RedisConfig::from_url(&url).expect("a URL").connect_timeout(Duration::from_secs(5));
    let backend = RedisBackend::connect(config).await.expect("connects");
    // The server is not part of a Cluster, but the node named it.
    assert_eq!(syncguard::LockBackend::capabilities(&backend).backend, "redis");
}
