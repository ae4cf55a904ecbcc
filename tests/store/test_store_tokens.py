"""Tokens open what they should, as long as they should; tenants, and who sees what."""

from __future__ import annotations

import re

import pytest
from store_samples import one

from thebes import store as db
from thebes.model.errors import UserError


def test_a_token_opens_the_door_for_its_user(store: db.Store) -> None:
    text, row = store.change_blocking(lambda c: db.create_token(c, "ann", "user", "lab", None, now_s=10.0))
    assert re.fullmatch(r"thb_[A-Za-z0-9_-]{43}", text)
    assert row.principal == db.Principal("ann", "user", "lab")
    assert (row.created_s, row.expires_s, row.revoked) == (10.0, None, False)
    with store.read() as c:
        assert db.find_token(c, text) == row
        assert db.list_tokens(c) == db.list_tokens(c, user="ann") == [row]
        assert db.list_tokens(c, user="bob") == []


def test_the_text_is_nowhere_in_the_store(sqlite_store: db.Store) -> None:
    store = sqlite_store
    text, row = store.change_blocking(lambda c: db.create_token(c, "ann", "user", "lab", None))
    store.close()
    files = [path.read_bytes() for path in store.path.parent.iterdir()]
    assert files
    assert not any(text.encode() in content or text[4:].encode() in content for content in files)
    assert text not in repr(row)


@pytest.mark.parametrize("wrong", ["", "thb_", "thb_" + "A" * 43, "THB_" + "A" * 43, "thb_" + "A" * 44, "é" * 47, "\0"])
def test_other_texts_open_nothing(store: db.Store, wrong: str) -> None:
    store.change_blocking(lambda c: db.create_token(c, "ann", "user", "lab", None))
    with store.read() as c:
        assert db.find_token(c, wrong) is None


def test_a_token_ends_at_its_time(store: db.Store) -> None:
    text, row = store.change_blocking(lambda c: db.create_token(c, "ann", "user", "lab", 100.0, now_s=10.0))
    with store.read() as c:
        assert db.find_token(c, text, now_s=99.9) == row
        assert db.find_token(c, text, now_s=100.0) is None
        assert db.find_token(c, text) is None  # by this machine's clock it is long past


def test_a_revoked_token_opens_nothing(store: db.Store) -> None:
    text, row = store.change_blocking(lambda c: db.create_token(c, "ann", "admin", "lab", None))
    assert store.change_blocking(lambda c: db.revoke_token(c, row.id))
    assert not store.change_blocking(lambda c: db.revoke_token(c, 99))
    with store.read() as c:
        assert db.find_token(c, text) is None
        assert db.list_tokens(c)[0].revoked


def test_there_are_two_roles(store: db.Store) -> None:
    with pytest.raises(UserError, match=r"'amin' is not a role\ndid you mean 'admin'"):
        store.change_blocking(lambda c: db.create_token(c, "ann", "amin", "lab", None))


def test_tenants(store: db.Store) -> None:
    store.change_blocking(lambda c: db.put_tenant(c, "ml"))
    store.change_blocking(lambda c: db.put_tenant(c, "lab", gpu_quota=4))
    store.change_blocking(lambda c: db.put_tenant(c, "lab", gpu_quota=8, open=True))
    with store.read() as c:
        assert db.get_tenant(c, "lab") == db.TenantRow("lab", 8, True)
        assert db.get_tenant(c, "bio") is None
        assert [row.name for row in db.list_tenants(c)] == ["lab", "ml"]
        assert db.viewer_of(c, db.Principal("ann", "user", "lab")) == db.Viewer(
            "ann", "user", "lab", frozenset({"lab"})
        )
    assert store.change_blocking(lambda c: db.delete_tenant(c, "ml"))
    assert not store.change_blocking(lambda c: db.delete_tenant(c, "ml"))


def test_a_tenant_with_jobs_is_not_deleted(store: db.Store) -> None:
    store.change_blocking(lambda c: db.put_tenant(c, "lab", gpu_quota=4))
    store.change_blocking(one(tenant="lab"))
    with pytest.raises(db.StoreConflict, match="tenant lab has 1 job that has not ended"):
        store.change_blocking(lambda c: db.delete_tenant(c, "lab"))
    store.change_blocking(lambda c: db.update_job(c, "1", state="completed"))
    assert store.change_blocking(lambda c: db.delete_tenant(c, "lab"))
